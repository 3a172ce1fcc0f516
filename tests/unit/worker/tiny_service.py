"""The scheduler's real core with real engines on a tiny model, in one process and in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from graphs.buckets import BucketLadder
from scheduler.actions import (
    Action,
    SendDecodeCancel,
    SendDecodeGrow,
    SendDecodeStarts,
    SendEvents,
    SendPrefill,
)
from scheduler.batching.cost_model import CostModel
from scheduler.batching.former import BatchFormer
from scheduler.batching.policies import FixedPolicy
from scheduler.core import QueueLimits, SchedulerCore
from scheduler.messages import (
    DecodeWorkerInfo,
    PoolHandle,
    PrefillWorkerInfo,
    Request,
    SamplingParams,
    StepReport,
)
from scheduler.prefix.hashing import DIGEST_BYTES, chain_digests
from tests.unit.scheduler.test_core_machine import Ends
from tests.unit.worker.tiny_models import PAGE_SIZE
from worker.decode import DecodeEngine
from worker.kv_pool import KVPool
from worker.model import Model
from worker.prefill import PrefillEngine

BLOCK_TOKENS = 2 * PAGE_SIZE
MAX_NUM_SEQS = 4


class TinyService:
    """Requests go in with `submit`, and `turn` lets everybody do what is next. `tokens` is what came out."""

    def __init__(self, model: Model, *, num_pages: int = 60, num_pools: int = 1, cached: bool = True) -> None:
        """`num_pages` are those of each pool that can be leased."""
        self.tokens: dict[str, list[int]] = {}
        self.num_cached: dict[str, int] = {}
        """Of the first prefill of each request."""
        self.num_computed = 0
        """Tokens that were prefilled."""
        self.num_prefilled = 0
        """With those that were cached."""
        self.num_queried = 0
        """Those of requests that might have had some cached."""
        self.batches: list[list[str]] = []
        """The requests of each prefill batch."""
        self.pool_of: dict[str, str] = {}
        """Where each request was prefilled last."""
        self.ends = Ends()
        self._model = model
        self._cached = cached
        self._num_pages = num_pages
        cost_model = CostModel.proportional([8, 32, 128])
        policy = FixedPolicy(max_requests=4, timeout_s=0.0, cost_model=cost_model)
        self.core = SchedulerCore(
            BatchFormer(policy, cost_model),
            QueueLimits(max_requests=1000, max_tokens=10**6),
            self.ends,
            block_tokens=BLOCK_TOKENS,
            min_shared_tokens=4 * BLOCK_TOKENS,
        )
        self._prefill = PrefillEngine("prefill-0", model, BucketLadder((8, 32), (2, 4)))
        self._decode: dict[str, DecodeEngine] = {}
        self.pools: dict[str, KVPool] = {}
        self._num_reports: dict[str, int] = {}
        self._now = 0.0
        self._incarnations = count(1)
        for i in range(num_pools):
            self.add_pool(f"decode-{i}")
        self.core.add_prefill_worker(
            PrefillWorkerInfo(
                name="prefill-0",
                model=model.info,
                buckets=(),
                graph_bytes=0,
                uses_cuda_graphs=False,
                bucket_seconds={},
                device="cpu",
                load_seconds=0.0,
                warmup_seconds=0.0,
            )
        )

    def add_pool(self, name: str) -> None:
        """Start a decode worker."""
        pool, handle = KVPool.create(
            self._model.kv_spec, name=name, num_pages=self._num_pages + 1, page_size=PAGE_SIZE
        )
        self._prefill.attach(handle)
        self.pools[name] = pool
        self._decode[name] = DecodeEngine(self._model, pool, max_num_seqs=MAX_NUM_SEQS)
        self._decode[name].prepare()
        self._num_reports[name] = 0
        self.core.add_decode_worker(_info(name, self._model, handle))

    def kill_pool(self, name: str) -> None:
        """A decode worker dies, and another takes its place with an empty pool."""
        del self._decode[name]
        self._prefill.detach(name)
        self.core.worker_lost(name, self._now, returns=True)
        self._perform_all()
        self.add_pool(name)

    def submit(self, name: str, prompt: Sequence[int], sampling: SamplingParams, *, salt: str = "") -> None:
        """Submit a request, as an ApiServer does."""
        root = salt.encode().ljust(DIGEST_BYTES, b"-")
        prefix = root + b"".join(chain_digests(root, prompt, BLOCK_TOKENS))
        request = Request(
            request_id=name,
            api_server="api-0",
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            prefix=prefix if self._cached else b"",
        )
        self.tokens[name] = []
        assert self.core.submit([request], self._now) is None

    def turn(self) -> None:
        """Everybody does what is next."""
        self._now += 1.0
        self._perform_all()
        for name, engine in list(self._decode.items()):
            if engine.has_work:
                outcome = engine.step()
                for _, event in outcome.events:
                    if event.token_id is not None:
                        self._take(event.request_id, event.index, event.token_id)
                self._num_reports[name] += 1
                report = StepReport(
                    worker=name,
                    seconds=outcome.seconds,
                    events=tuple(event for _, event in outcome.events),
                    released=tuple(outcome.released),
                    num_stalled=outcome.num_stalled,
                    number=self._num_reports[name],
                )
                self.core.step_done(report, self._now)
        self._perform_all()

    def run(self) -> None:
        """Let everything come to its end."""
        for _ in range(10_000):
            if not self.core.num_live:
                break
            self.turn()
        assert not self.core.num_live
        self.turn()
        for ledger in self.core.ledgers:
            assert (ledger.num_leases, ledger.free_pages) == (0, ledger.num_pages)

    def answer(
        self, name: str, prompt: Sequence[int], sampling: SamplingParams, *, salt: str = ""
    ) -> list[int]:
        """Serve one request alone; return its tokens."""
        self.submit(name, prompt, sampling, salt=salt)
        self.run()
        return self.tokens[name]

    def _perform_all(self) -> None:
        while actions := self.core.tick(self._now):
            for action in actions:
                self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case SendPrefill(batch=batch):
                self.batches.append([item.request.request_id for item in batch.items])
                self.pool_of |= {item.request.request_id: batch.decode_worker for item in batch.items}
                result = self._prefill.run(batch)
                self.num_computed += result.num_tokens
                self.num_queried += result.num_query_tokens
                self.num_prefilled += sum(item.request.num_prefill_tokens for item in batch.items)
                for item, outcome in zip(batch.items, result.outcomes, strict=True):
                    if outcome.token_id is not None:
                        index = len(item.request.output_token_ids)
                        self._take(outcome.request_id, index, outcome.token_id)
                        self.num_cached.setdefault(outcome.request_id, outcome.num_cached_tokens)
                self.core.prefill_done(result, self._now)
            case SendDecodeStarts(worker=worker, starts=starts):
                for start in starts:
                    self._decode[worker].add(start)
            case SendDecodeGrow(worker=worker, grants=grants):
                for grant in grants:
                    self._decode[worker].grow(grant)
            case SendDecodeCancel(worker=worker, refs=refs):
                for ref in refs:
                    self._decode[worker].cancel(ref)
            case SendEvents(events=events):
                raise AssertionError(f"a request failed: {events}")
            case _:
                raise AssertionError(f"unexpected: {action}")

    def _take(self, name: str, index: int, token_id: int) -> None:
        """A token reached the ApiServer, perhaps again."""
        tokens = self.tokens[name]
        if index < len(tokens):
            assert tokens[index] == token_id, f"token {index} of {name} differs when it is computed again"
        else:
            assert index == len(tokens)
            tokens.append(token_id)


def _info(name: str, model: Model, handle: PoolHandle) -> DecodeWorkerInfo:
    return DecodeWorkerInfo(
        name=name,
        model=model.info,
        pool=handle,
        max_num_seqs=MAX_NUM_SEQS,
        device="cpu",
        load_seconds=0.0,
        weights_bytes=0,
    )
