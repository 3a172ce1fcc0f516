"""The DecodeWorker actor: a thin shell around `DecodeEngine`, and the thread that steps it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import ray

from scheduler.messages import (
    RAY_NAMESPACE,
    SCHEDULER_NAME,
    DecodeStart,
    DecodeWorkerInfo,
    PageGrant,
    SequenceRef,
    StepReport,
    WorkerConfig,
)

if TYPE_CHECKING:
    from worker.decode import DecodeEngine, StepOutcome
    from worker.events import EventSender
    from worker.handoff.receiver import Receiver
    from worker.kv_pool import KVPool


class DecodeWorker:
    """Owns KV pages and decodes the sequences in them. `run` steps; the other calls only leave it commands."""

    # Imports of torch are in `load`, for the reason given in prefill_actor.

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        # Only the thread in `run` touches the engine; commands reach it through this queue.
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._engine: DecodeEngine
        self._sender: EventSender
        self._pool: KVPool
        self._receiver: Receiver
        self._info: DecodeWorkerInfo | None = None
        self._stepping = threading.Lock()

    def __repr__(self) -> str:
        return f"DecodeWorker({self._config.name}, {self._config.model_name})"

    def load(self, fence_epoch: int = 0) -> DecodeWorkerInfo:
        """Load the model, allocate the KV pages and warm up. Raises `ConfigError` with the reason.

        A worker that is loaded drops what it does for a scheduler that is gone. Leases older than `fence_epoch` are
        refused from then on.
        """
        if self._info is None:
            self._info = self._load()
            return self._info
        self._commands.put(None)
        with self._stepping:
            while not self._commands.empty():
                self._commands.get()
            self._engine.reset()
            self._pool.fence(fence_epoch)
        return self._info

    def _load(self) -> DecodeWorkerInfo:
        from worker import startup
        from worker.decode import DecodeEngine
        from worker.events import EventSender
        from worker.kv_pool import KVPool

        config, started = self._config, time.perf_counter()
        model = startup.load(config)
        pool, handle = KVPool.create(
            model.kv_spec,
            name=config.name,
            num_pages=startup.choose_num_pages(model, config),
            page_size=startup.page_size(model),
            device=model.device,
        )
        self._pool = pool
        self._sender = EventSender(config.name)
        handle = replace(handle, node_id=ray.get_runtime_context().get_node_id())
        if config.takes_remote_pages != "no":
            from worker.handoff.receiver import Receiver

            host = "127.0.0.1"
            if config.takes_remote_pages == "node":
                host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            self._receiver = Receiver(pool, name=config.name, host=host)
            handle = replace(handle, endpoint=self._receiver.endpoint)
        self._engine = DecodeEngine(
            model, pool, max_num_seqs=config.max_num_seqs, use_graphs=config.use_graphs
        )
        reports = self._engine.prepare()
        return DecodeWorkerInfo(
            name=config.name,
            model=model.info,
            pool=handle,
            max_num_seqs=config.max_num_seqs,
            device=model.device.type,
            load_seconds=time.perf_counter() - started,
            weights_bytes=model.weights_bytes,
            bucket_seconds={str(report.bucket): report.batch_seconds for report in reports},
        )

    def add(self, starts: tuple[DecodeStart, ...]) -> None:
        """Take up prefilled sequences with the next step."""
        for start in starts:
            self._commands.put(partial(self._engine.add, start))

    def grow(self, grants: tuple[PageGrant, ...]) -> None:
        """Give running sequences more pages before the next step."""
        for grant in grants:
            self._commands.put(partial(self._engine.grow, grant))

    def cancel(self, refs: tuple[SequenceRef, ...]) -> None:
        """Drop sequences before the next step; their pages are in its report's `released`."""
        for ref in refs:
            self._commands.put(partial(self._engine.cancel, ref))

    def stop(self) -> None:
        """Make `run` return after its step."""
        self._commands.put(None)

    def run(self, run_id: int = 0) -> None:
        """Step until `stop`. The scheduler waits for this call: its end is how it learns of a failure.

        Reports carry `run_id`. An error ends the process: what it holds cannot be trusted.
        """
        from worker.failures import end_process

        scheduler = ray.get_actor(SCHEDULER_NAME, namespace=RAY_NAMESPACE)
        numbers = count(1)
        with self._stepping:
            try:
                while self._obey():
                    outcome = self._engine.step()
                    self._sender.send(outcome.events)
                    scheduler.step_done.remote(self._report(outcome, run_id, next(numbers)))
            except Exception as error:
                end_process(self._config.name, error)

    def _obey(self) -> bool:
        """Carry out the commands that wait, or wait for one if there is nothing to step. False means stop."""
        while True:
            try:
                command = self._commands.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _report(self, outcome: StepOutcome, run_id: int, number: int) -> StepReport:
        return StepReport(
            worker=self._config.name,
            seconds=outcome.seconds,
            # The scheduler has no use for logprobs, which are by far the largest part where they are wanted.
            events=tuple(
                event if event.logprobs is None else replace(event, logprobs=None)
                for _, event in outcome.events
            ),
            released=tuple(outcome.released),
            num_stalled=outcome.num_stalled,
            number=number,
            run_id=run_id,
        )
