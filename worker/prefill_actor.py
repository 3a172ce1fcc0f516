"""The PrefillWorker actor: a thin shell around `PrefillEngine`."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import ray

from scheduler.messages import (
    HandoffResult,
    PoolHandle,
    PrefillBatch,
    PrefillResult,
    PrefillWorkerInfo,
    Timing,
    TokenEvent,
    WorkerConfig,
)
from worker.figures import WorkerFigures
from worker.pacing import Pacer

if TYPE_CHECKING:
    from worker.events import EventSender
    from worker.model import Model
    from worker.prefill import PrefillEngine


class PrefillWorker:
    """Computes prefill batches, one after the other, in the order in which the scheduler sends them."""

    # torch and the model are imported in `load`, in the actor's own process: the process that starts the actor
    # imports this class, and needs neither.

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._model: Model | None = None
        self._load_seconds = 0.0
        self._engine: PrefillEngine
        self._figures: WorkerFigures
        self._sender: EventSender
        self._info: PrefillWorkerInfo | None = None
        self._pacer = Pacer(config.decode_share)

    def __repr__(self) -> str:
        return f"PrefillWorker({self._config.name}, {self._config.model_name})"

    def load_model(self) -> None:
        """Load the model, while the decode workers make their pools. Raises `ConfigError` with the reason."""
        from worker.parallel.actor import load

        started = time.perf_counter()
        self._model = load(self._config)
        self._load_seconds = time.perf_counter() - started

    def load(self, pools: tuple[PoolHandle, ...]) -> PrefillWorkerInfo:
        """Load the model, unless `load_model` has, open the decode workers' pools and warm up.

        Raises `ConfigError` with the reason. A worker that is loaded only opens the pools that it does not have open.
        """
        if self._info is None:
            self._info = self._load()
        started = time.perf_counter()
        bucket_seconds = dict(self._info.bucket_seconds)
        for pool in pools:
            if self._engine.has_open(pool):
                continue
            reports = self._engine.attach(pool)
            if self._engine.model.device.type == "cuda":
                from worker import startup

                startup.log_buckets(self._config.name, reports)
            bucket_seconds |= {str(report.bucket): report.batch_seconds for report in reports}
        self._info = replace(
            self._info,
            buckets=tuple(bucket_seconds),
            graph_bytes=self._engine.buffer_bytes,
            uses_cuda_graphs=self._engine.uses_graphs,
            bucket_seconds=bucket_seconds,
            warmup_seconds=self._info.warmup_seconds + time.perf_counter() - started,
            transports=self._engine.transports,
        )
        return self._info

    def _load(self) -> PrefillWorkerInfo:
        from worker.engines import make_prefill
        from worker.events import EventSender
        from worker.flops import peak_flops

        if self._model is None:
            self.load_model()
        config, model = self._config, self._model
        assert model is not None
        self._sender = EventSender(config.name)
        node_id = ray.get_runtime_context().get_node_id()
        self._engine = make_prefill(model, config, node_id=node_id)
        peak = peak_flops(model.device, model.kv_spec.dtype)
        peak = peak and peak * model.num_ranks
        self._figures = WorkerFigures("prefill", config.name, model=config.model_name, peak_flops=peak)
        return PrefillWorkerInfo(
            name=config.name,
            model=model.info,
            buckets=(),
            graph_bytes=0,
            uses_cuda_graphs=False,
            bucket_seconds={},
            device=model.device.type,
            load_seconds=self._load_seconds,
            warmup_seconds=0.0,
            node_id=node_id,
            peak_flops=peak,
        )

    def attach(self, pool: PoolHandle) -> str:
        """Open the pool of a decode worker that joins; return the transport. Raises `ConfigError` with the reason."""
        self._engine.attach(pool)
        return self._engine.transports[pool.decode_worker]

    def detach(self, decode_worker: str) -> None:
        """Forget a decode worker that is gone."""
        self._engine.detach(decode_worker)

    def prefill(self, batch: PrefillBatch) -> PrefillResult:
        """Compute a batch: first tokens go straight to the ApiServers, the result to the scheduler."""
        taken = time.perf_counter()
        time.sleep(self._pacer.wait_s(time.monotonic(), is_decoding=self._engine.is_decoding))
        try:
            result = self._engine.run(batch)
        except Exception as error:
            from worker.failures import end_process

            end_process(self._config.name, error)
        self._pacer.computed(result.seconds, time.monotonic())
        prefill_s = time.perf_counter() - taken
        self._sender.send(
            (
                item.request.api_server,
                TokenEvent(
                    request_id=outcome.request_id,
                    index=len(item.request.output_token_ids),
                    epoch=item.lease.epoch,
                    token_id=outcome.token_id,
                    finish_reason=outcome.finish_reason,
                    logprobs=outcome.logprobs,
                    prompt_logprobs=outcome.prompt_logprobs,
                    timing=Timing(queued_s=item.queued_s, held_s=item.held_s, prefill_s=prefill_s),
                ),
            )
            for item, outcome in zip(batch.items, result.outcomes, strict=True)
            if outcome.token_id is not None
        )
        self._figures.prefilled(result)
        # The scheduler has no use for logprobs, which are by far the largest part where they are wanted.
        return replace(
            result,
            outcomes=tuple(replace(o, logprobs=None, prompt_logprobs=None) for o in result.outcomes),
        )

    # In threads of its own, so that the next batch is computed meanwhile.
    @ray.method(concurrency_group="handoff")
    def handed_off(self, batch_id: int) -> HandoffResult:
        """Wait until the pages of a computed batch have arrived at their decode worker, or cannot."""
        handoff = self._engine.handed_off(batch_id)
        self._figures.handed_off(handoff)
        return handoff

    @ray.method(concurrency_group="life")
    def live(self) -> None:
        """Never return. The scheduler waits for this call: its end is how it learns that an idle worker died."""
        threading.Event().wait()
