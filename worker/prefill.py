"""Prefill: turns a batch of prompts into first tokens, and into KV in the pages that were leased for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from graphs.buckets import BucketLadder, Segment, plan_passes
from graphs.layout import SlotInput
from graphs.runner import BucketReport
from scheduler.errors import (
    ConfigError,
    HandoffError,
    InvalidRequestError,
    PurefillError,
    StaleLeaseError,
    WorkerFailedError,
)
from scheduler.messages import (
    HandoffResult,
    PoolHandle,
    PrefillBatch,
    PrefillItem,
    PrefillResult,
    Request,
)
from worker.failures import is_fatal
from worker.flops import PrefillCost
from worker.handoff.base import Handoff, Writing
from worker.handoff.choose import choose_transport
from worker.handoff.direct import DirectHandoff
from worker.handoff.sender import SendHandoff, Staging
from worker.handoff.sharded import ReslicedHandoff, open_shards
from worker.kv_pool import KVPool
from worker.model import Model
from worker.model_runner import ModelRunner
from worker.outputs import OutputState, slot_input
from worker.parallel.link import ClosePool, CopyPages, Leader, OpenPool, UsePool, together
from worker.prefill_plan import (
    Known,
    Started,
    failed_result,
    merge_handoffs,
    merge_results,
    split_batch,
)
from worker.prefill_submitted import DeviceTime, Launched, PendingHandoff, SubmittedPrefill, draft_result

_LOG = logging.getLogger(__name__)


class PrefillEngine:
    """Owns the model, the ways to the decode workers, and the static buffers and graphs that fill their pages."""

    def __init__(
        self,
        name: str,
        model: Model,
        ladder: BucketLadder,
        *,
        use_graphs: bool = True,
        node_id: str = "",
        handoff_transport: str = "auto",
    ) -> None:
        """`node_id` says on which host this is, and `handoff_transport` which way pages must go, if not any."""
        self.name = name
        self.model = model
        self._cost = PrefillCost.of(model)
        self._ladder = ladder
        self._use_graphs = use_graphs
        self._node_id = node_id
        self._wanted = handoff_transport
        self._staging: Staging | None = None
        self._handoffs: dict[str, Handoff] = {}
        self._runners: dict[str, ModelRunner] = {}
        self._open: dict[str, PoolHandle] = {}
        self._device_time = DeviceTime()
        self._pending: dict[int, list[PendingHandoff]] = {}
        """Of batches that are computed: what is still on its way."""

    def attach(self, handle: PoolHandle) -> tuple[BucketReport, ...]:
        """Find the way to a decode worker's pool and do as `attach_handoff`.

        Raises `ConfigError` if there is none, or if the pool does not fit this model.
        """
        self._forget(handle.decode_worker)
        # In two parts: no rank captures, which takes all of them, before each has found its way.
        with together(self._leader, OpenPool(handle=handle)):
            handoff = self.find_way(handle)
        with together(self._leader, UsePool(decode_worker=handle.decode_worker)):
            reports = self.attach_handoff(handle.decode_worker, handoff)
        self._open[handle.decode_worker] = handle
        return reports

    def has_open(self, handle: PoolHandle) -> bool:
        """Whether this very pool was attached: a decode worker that starts again has another one."""
        return self._open.get(handle.decode_worker) == handle

    def find_way(self, handle: PoolHandle) -> Handoff:
        """Return the way to a decode worker's pool. Raises `ConfigError` as `attach` does."""
        transport = choose_transport(
            handle, node_id=self._node_id, device_type=self.model.device.type, wanted=self._wanted
        )
        if handle.shards or self.model.group is not None:
            return open_shards(
                handle,
                self.model.kv_spec,
                transport=transport,
                group=self.model.group,
                device=self.model.device,
                staging=lambda: self._get_staging(handle.page_size),
            )
        if transport in ("shm", "cuda_ipc"):
            return DirectHandoff(KVPool.open(self.model.kv_spec, handle, self.model.device))
        try:
            return SendHandoff(handle.endpoint, self._get_staging(handle.page_size))
        except HandoffError as error:
            raise ConfigError(f"{handle.decode_worker} cannot be reached: {error}") from error

    def attach_pool(self, decode_worker: str, pool: KVPool) -> tuple[BucketReport, ...]:
        """Do as `attach_handoff` with a decode worker's own pool."""
        return self.attach_handoff(decode_worker, DirectHandoff(pool))

    def attach_handoff(self, decode_worker: str, handoff: Handoff) -> tuple[BucketReport, ...]:
        """Capture the graphs that write where `handoff` wants it; return what each bucket took.

        Those of a pool that serves other decode workers too are captured once, and reported once.
        """
        for other, runner in self._runners.items():
            if self._handoffs[other].pool is handoff.pool:
                self._handoffs[decode_worker], self._runners[decode_worker] = handoff, runner
                return ()
        runner = ModelRunner(self.model, handoff.pool, self._ladder, use_graphs=self._use_graphs)
        self._handoffs[decode_worker], self._runners[decode_worker] = handoff, runner
        return runner.prepare()

    def detach(self, decode_worker: str) -> None:
        """Forget a decode worker that is gone. Nothing happens if it is not known."""
        with together(self._leader, ClosePool(decode_worker=decode_worker)):
            self._forget(decode_worker)

    def copy_pages(self, copy: CopyPages) -> None:
        """Do this rank's part of a handoff that rank 0 finishes."""
        handoff = self._handoffs[copy.decode_worker]
        assert isinstance(handoff, ReslicedHandoff)
        handoff.copy(copy.source, copy.target)

    def _forget(self, decode_worker: str) -> None:
        handoff = self._handoffs.pop(decode_worker, None)
        self._runners.pop(decode_worker, None)
        self._open.pop(decode_worker, None)
        if handoff is not None:
            handoff.close()

    @property
    def transports(self) -> dict[str, str]:
        """How pages reach each decode worker, by name."""
        return {name: handoff.transport for name, handoff in self._handoffs.items()}

    @property
    def _leader(self) -> Leader | None:
        return None if self.model.group is None else self.model.group.leader

    def _get_staging(self, page_size: int) -> Staging:
        if self._staging is None:
            self._staging = self._make_staging(page_size)
        return self._staging

    def _make_staging(self, page_size: int) -> Staging:
        """Allocate pages for what is sent elsewhere: two full batches, and at least one prompt of any length."""
        largest = self._ladder.buckets[0]
        for_batches = 2 * (-(-largest.num_tokens // page_size) + largest.num_slots)
        for_prompt = -(-self.model.info.max_model_len // page_size)
        return Staging(
            KVPool.on_device(
                self.model.kv_spec,
                num_pages=1 + max(for_batches, for_prompt),
                page_size=page_size,
                device=self.model.device,
            )
        )

    @property
    def is_decoding(self) -> bool:
        """Whether any sequence decodes in the pools that this worker writes into."""
        return any(handoff.pool.num_running for handoff in self._handoffs.values())

    @property
    def uses_graphs(self) -> bool:
        """Whether batches are replays of captured CUDA graphs."""
        on_gpu = self.model.device.type == "cuda"
        return on_gpu and all(runner.eager_reason is None for runner in self._distinct_runners())

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all static buffers and graphs."""
        return sum(runner.size_bytes for runner in self._distinct_runners())

    def _distinct_runners(self) -> list[ModelRunner]:
        return list({id(runner): runner for runner in self._runners.values()}.values())

    def run(self, batch: PrefillBatch) -> PrefillResult:
        """Compute a batch. An item whose lease is stale, or that cannot be computed, fails alone.

        If `PrefillResult.handoff_pending`, `handed_off` says later what became of the pages. Raises what the process
        cannot go on after (`is_fatal`).
        """
        try:
            return self.start(batch).result()
        except Exception as error:
            return self.recover(batch, error)

    def start(self, batch: PrefillBatch) -> Started:
        """Start a batch, whose result may be taken in another thread. Where either raises, `recover` is what is left.

        Into pages that decode workers share it returns before the batch is computed, on a GPU.
        """
        if batch.decode_worker not in self._handoffs:
            gone = StaleLeaseError(f"{batch.decode_worker} is gone, and its pages with it")
            return Known(failed_result(self.name, batch, gone))
        handoff = self._handoffs[batch.decode_worker]
        if handoff.max_pages is None:
            return self.submit(batch)
        # Its parts may not fit into our own pages together, and reading them out would wait for the next batch.
        parts = split_batch(batch, handoff.max_pages, handoff.pool.page_size)
        return Known(merge_results([self.submit(part).result() for part in parts]))

    def recover(self, batch: PrefillBatch, error: Exception) -> PrefillResult:
        """Compute the items of a batch alone, as one of them is bad. What was computed goes to the same pages again.

        Raises `error` if the process cannot go on after it (`is_fatal`), or if other ranks may be in that batch still.
        """
        if is_fatal(error) or self.model.group is not None:
            raise error
        _LOG.error("batch %d of %d requests", batch.batch_id, len(batch.items), exc_info=error)
        if len(batch.items) == 1:
            return failed_result(self.name, batch, WorkerFailedError(f"{type(error).__name__}: {error}"))
        return merge_results([self.run(replace(batch, items=(item,))) for item in batch.items])

    def handed_off(self, batch_id: int) -> HandoffResult:
        """Wait until the pages of a batch have arrived, or cannot. For another thread than that of `run`."""
        return merge_handoffs([pending.result() for pending in self._pending.pop(batch_id)])

    def submit(self, batch: PrefillBatch) -> SubmittedPrefill:
        """Start a batch. On a GPU this returns before it is computed, so that the next one can be prepared."""
        started = time.perf_counter()
        handoff, runner = self._handoffs[batch.decode_worker], self._runners[batch.decode_worker]
        tokens = [_tokens(item.request) for item in batch.items]
        lengths = [len(ids) for ids in tokens]
        writing = handoff.begin([item.lease for item in batch.items], lengths)
        try:
            launched = self._launch(batch, tokens, writing)
        except BaseException:
            handoff.finish(writing)  # Whatever it holds, its pages come back.
            raise
        return SubmittedPrefill(
            batch=batch,
            launched=launched,
            handoff=handoff,
            writing=writing,
            pending=self._pending,
            draft=draft_result(self.name, batch, launched, cost=self._cost, eager_reason=runner.eager_reason),
            started=started,
            device_time=self._device_time,
        )

    def _launch(self, batch: PrefillBatch, tokens: Sequence[Sequence[int]], writing: Writing) -> Launched:
        """Start the passes of a batch whose KV goes where `writing` says."""
        runner = self._runners[batch.decode_worker]
        refused: dict[int, PurefillError] = dict(writing.refused)
        states: list[OutputState | None] = [None] * len(batch.items)
        for i, item in enumerate(batch.items):
            try:
                states[i] = None if i in refused else runner.track(item.request)
            except InvalidRequestError as error:
                refused[i] = error
        # First, because the passes of the batch write the same KV again: what stays does not depend on this.
        prompt_reports = {
            item.request.request_id: runner.report_prompt(item.request.prompt_token_ids, writing.page_ids[i])
            for i, item in enumerate(batch.items)
            if i not in refused and item.request.reports_prompt
        }
        largest = runner.ladder.buckets[0]
        plan = plan_passes(
            [0 if i in refused else len(ids) for i, ids in enumerate(tokens)],
            max_tokens=largest.num_tokens,
            max_slots=largest.num_slots,
            starts=writing.num_cached,
        )
        passes = [
            (
                segments,
                runner.submit(
                    [
                        _slot(
                            batch.items[s.item], tokens[s.item], s, states[s.item], writing.page_ids[s.item]
                        )
                        for s in segments
                    ]
                ),
            )
            for segments in plan
        ]
        return Launched(
            refused={batch.items[i].request.request_id: error for i, error in refused.items()},
            passes=passes,
            prompt_reports=prompt_reports,
        )


def _tokens(request: Request) -> Sequence[int]:
    """Return all tokens of which a request needs the KV."""
    if not request.output_token_ids:
        return request.prompt_token_ids
    return (*request.prompt_token_ids, *request.output_token_ids)


def _slot(
    item: PrefillItem,
    token_ids: Sequence[int],
    segment: Segment,
    state: OutputState | None,
    page_ids: Sequence[int],
) -> SlotInput:
    return slot_input(
        item.request,
        token_ids
        if segment.end - segment.start == len(token_ids)
        else token_ids[segment.start : segment.end],
        num_cached=segment.start,
        page_ids=page_ids,
        output_index=len(item.request.output_token_ids),
        # Nobody wants what an earlier chunk chooses.
        state=state if segment.end == len(token_ids) else None,
    )
