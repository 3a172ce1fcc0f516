"""The PrefillWorker actor: a thin shell around `PrefillEngine`."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import ray

from scheduler.errors import StaleLeaseError
from scheduler.garbage import freeze_what_is_loaded
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
from scheduler.wire import ThreadReactor, Wire, WireServer, serve_actor
from worker.figures import WorkerFigures
from worker.pacing import Pacer
from worker.prefill_pipeline import PrefillPipeline
from worker.prefill_plan import Known, Started, failed_result

if TYPE_CHECKING:
    from worker.events import EventSender
    from worker.model import Model
    from worker.prefill import PrefillEngine


class PrefillWorker:
    """Computes prefill batches, one after the other, in the order in which the scheduler sends them.

    What touches the engine does so in the pipeline's threads.
    """

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
        self._pipeline = PrefillPipeline(self, fail=self._end)
        self._handing_off = ThreadPoolExecutor(8, "handoff")
        self._first_batch_id = 0
        self._reactor = ThreadReactor("wire")
        self._wire = Wire(self._reactor)
        self._server: WireServer | None = None

    def __repr__(self) -> str:
        return f"PrefillWorker({self._config.name}, {self._config.model_name})"

    def import_modules(self) -> None:
        """Import what loading and compiling the model will need, which takes seconds, while others use the GPU."""
        self._pipeline.call(self._import_modules)

    def _import_modules(self) -> None:
        from worker import engines, startup  # noqa: F401

        startup.import_compiler(self._config)

    def load_model(self) -> None:
        """Load the model, while the decode workers make their pools. Raises `ConfigError` with the reason."""
        self._pipeline.call(self._load_model)

    def _load_model(self) -> None:
        from worker.parallel.actor import load

        started = time.perf_counter()
        self._model = load(self._config)
        self._load_seconds = time.perf_counter() - started

    def load(self, pools: tuple[PoolHandle, ...]) -> PrefillWorkerInfo:
        """Load the model, unless `load_model` has, open the decode workers' pools and warm up.

        Raises `ConfigError` with the reason. A worker that is loaded only opens the pools that it does not have open.
        """
        info: PrefillWorkerInfo = self._pipeline.call(lambda: self._load_and_open(pools))
        if self._server is None:
            # Not earlier: what comes is for this process, of which the scheduler learns now.
            self._server = serve_actor(
                self._config.name,
                self._reactor,
                {
                    "prefill": self._pipeline.submit,
                    "handed_off": lambda batch_id: self._handing_off.submit(self._handed_off, batch_id),
                },
            )
        return info

    def _load_and_open(self, pools: tuple[PoolHandle, ...]) -> PrefillWorkerInfo:
        from worker import startup

        if self._info is None:
            self._info = self._load()
        started = time.perf_counter()
        bucket_seconds = dict(self._info.bucket_seconds)
        for pool in pools:
            if self._engine.has_open(pool):
                continue
            reports = self._engine.attach(pool)
            startup.log_buckets(self._config.name, self._engine.model, reports)
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
        freeze_what_is_loaded()
        return self._info

    def _load(self) -> PrefillWorkerInfo:
        from worker.engines import make_prefill
        from worker.events import EventSender
        from worker.flops import peak_flops

        if self._model is None:
            self._load_model()
        config, model = self._config, self._model
        assert model is not None
        self._sender = EventSender(config.name, self._wire)
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
        transport: str = self._pipeline.call(lambda: self._attach(pool))
        return transport

    def _attach(self, pool: PoolHandle) -> str:
        self._engine.attach(pool)
        return self._engine.transports[pool.decode_worker]

    def detach(self, decode_worker: str) -> None:
        """Forget a decode worker that is gone."""
        self._pipeline.call(lambda: self._engine.detach(decode_worker))

    def retire(self, life: int) -> None:
        """Return once no batch of a scheduler before `life` is computed: its pages are about to be given to others.

        Those that still come are refused: ids of batches are not below the life of their scheduler.
        """
        self._first_batch_id = life
        self._pipeline.call(lambda: None)

    def prefill(self, batch: PrefillBatch) -> PrefillResult:
        """Compute a batch: first tokens go straight to the ApiServers, the result to the scheduler."""
        return self._pipeline.submit(batch).result()

    # The pipeline's steps.

    def pause_s(self) -> float | None:
        """Return how long the device is decode's alone, None if it is to have no share of its own."""
        if not self._config.decode_share:
            return None
        # A batch that was started ahead could not be held back if the one before it gives decode something to do.
        return self._pacer.wait_s(time.monotonic(), is_decoding=self._engine.is_decoding)

    def begin(self, batch: PrefillBatch) -> Started:
        """Start a batch."""
        if batch.batch_id < self._first_batch_id:
            gone = StaleLeaseError(f"batch {batch.batch_id} is of a scheduler that is gone")
            return Known(failed_result(self._config.name, batch, gone))
        return self._engine.start(batch)

    def recover(self, batch: PrefillBatch, error: Exception) -> PrefillResult:
        """Compute a batch item by item."""
        return self._engine.recover(batch, error)

    def finish(
        self, batch: PrefillBatch, result: PrefillResult, *, waited_s: float, prefill_s: float
    ) -> PrefillResult:
        """Send the first tokens to the ApiServers, and return what the scheduler is to have."""
        self._pacer.computed(result.seconds, time.monotonic())
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
                    num_cached_tokens=outcome.num_cached_tokens,
                    timing=Timing(queued_s=item.queued_s + waited_s, held_s=item.held_s, prefill_s=prefill_s),
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

    def _end(self, error: Exception) -> None:
        from worker.failures import end_process

        end_process(self._config.name, error)

    # In threads of its own, so that the next batch is computed meanwhile.
    @ray.method(concurrency_group="handoff")
    def handed_off(self, batch_id: int) -> HandoffResult:
        """Wait until the pages of a computed batch have arrived at their decode worker, or cannot."""
        return self._handed_off(batch_id)

    def _handed_off(self, batch_id: int) -> HandoffResult:
        handoff = self._engine.handed_off(batch_id)
        self._figures.handed_off(handoff)
        return handoff

    @ray.method(concurrency_group="life")
    def live(self) -> None:
        """Never return. The scheduler waits for this call: its end is how it learns that an idle worker died."""
        threading.Event().wait()
