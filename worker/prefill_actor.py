"""The PrefillWorker actor: a thin shell around `PrefillEngine`."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from scheduler.messages import (
    PoolHandle,
    PrefillBatch,
    PrefillResult,
    PrefillWorkerInfo,
    TokenEvent,
    WorkerConfig,
)

if TYPE_CHECKING:
    from worker.events import EventSender
    from worker.prefill import PrefillEngine


class PrefillWorker:
    """Computes prefill batches, one after the other, in the order in which the scheduler sends them."""

    # torch and the model are imported in `load`, in the actor's own process: the process that starts the actor
    # imports this class, and needs neither.

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._engine: PrefillEngine
        self._sender: EventSender

    def __repr__(self) -> str:
        return f"PrefillWorker({self._config.name}, {self._config.model_name})"

    def load(self, pools: tuple[PoolHandle, ...]) -> PrefillWorkerInfo:
        """Load the model, open the decode workers' pools and warm up. Raises `ConfigError` with the reason."""
        from worker import startup
        from worker.events import EventSender
        from worker.prefill import PrefillEngine

        config, started = self._config, time.perf_counter()
        model = startup.load(config)
        loaded = time.perf_counter()
        ladder = startup.choose_ladder(model, config)
        self._sender = EventSender(config.name)
        self._engine = PrefillEngine(config.name, model, ladder, use_graphs=config.use_graphs)
        bucket_seconds: dict[str, float] = {}
        for pool in pools:
            reports = self._engine.attach(pool)
            if model.device.type == "cuda":
                startup.log_buckets(config.name, reports)
            bucket_seconds = {str(report.bucket): report.batch_seconds for report in reports}
        return PrefillWorkerInfo(
            name=config.name,
            model=model.info,
            buckets=tuple(bucket_seconds),
            graph_bytes=self._engine.buffer_bytes,
            uses_cuda_graphs=self._engine.uses_graphs,
            bucket_seconds=bucket_seconds,
            device=model.device.type,
            load_seconds=loaded - started,
            warmup_seconds=time.perf_counter() - loaded,
        )

    def prefill(self, batch: PrefillBatch) -> PrefillResult:
        """Compute a batch: first tokens go straight to the ApiServers, the result to the scheduler."""
        result = self._engine.run(batch)
        self._sender.send(
            (
                item.request.api_server,
                TokenEvent(
                    request_id=outcome.request_id,
                    index=len(item.request.output_token_ids),
                    token_id=outcome.token_id,
                    finish_reason=outcome.finish_reason,
                    logprobs=outcome.logprobs,
                    prompt_logprobs=outcome.prompt_logprobs,
                ),
            )
            for item, outcome in zip(batch.items, result.outcomes, strict=True)
            if outcome.token_id is not None
        )
        # The scheduler has no use for logprobs, which are by far the largest part where they are wanted.
        return replace(
            result,
            outcomes=tuple(replace(o, logprobs=None, prompt_logprobs=None) for o in result.outcomes),
        )
