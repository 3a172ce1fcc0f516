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

from scheduler.garbage import freeze_what_is_loaded
from scheduler.messages import (
    SCHEDULER_NAME,
    DecodeStart,
    DecodeWorkerInfo,
    PageGrant,
    PoolHandle,
    SequenceRef,
    StepReport,
    WorkerConfig,
)
from scheduler.wire import ThreadReactor, Wire, WireServer, serve_actor
from worker.figures import WorkerFigures

if TYPE_CHECKING:
    from worker.decode import DecodeEngine, StepOutcome
    from worker.events import EventSender
    from worker.handoff.receiver import Receiver
    from worker.kv_pool import KVPool
    from worker.model import Model


class DecodeWorker:
    """Owns KV pages and decodes the sequences in them. `run` steps; the other calls only leave it commands."""

    # Imports of torch are in `make_pool`, for the reason given in prefill_actor.

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        # Only the thread in `run` touches the engine; commands reach it through this queue.
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._model: Model
        self._engine: DecodeEngine
        self._figures: WorkerFigures
        self._sender: EventSender
        self._pool: KVPool
        self._receiver: Receiver
        self._server: WireServer
        self._handle: PoolHandle | None = None
        self._load_seconds = 0.0
        self._info: DecodeWorkerInfo | None = None
        self._stepping = threading.Lock()
        self._reactor = ThreadReactor("wire")
        self._wire = Wire(self._reactor)

    def __repr__(self) -> str:
        return f"DecodeWorker({self._config.name}, {self._config.model_name})"

    def load(self, fence_epoch: int = 0) -> DecodeWorkerInfo:
        """Load the model and allocate the KV pages, unless `make_pool` has, and warm up.

        A worker that is loaded drops what it does for a scheduler that is gone. Leases older than `fence_epoch` are
        refused from then on. Raises `ConfigError` with the reason.
        """
        if self._info is None:
            self._info = self._load()
            # Not earlier: what comes is for this process, whose pool the scheduler knows from now on.
            self._server = serve_actor(
                self._config.name,
                self._reactor,
                {"add": self.add, "grow": self.grow, "cancel": self.cancel},
            )
            freeze_what_is_loaded()
            return self._info
        self._commands.put(None)
        with self._stepping:
            while not self._commands.empty():
                self._commands.get()
            self._engine.reset()
            self._pool.fence(fence_epoch)
        return self._info

    def make_pool(self) -> PoolHandle:
        """Load the model and allocate the KV pages, unless that is done. Raises `ConfigError` with the reason.

        Prefill workers can open the pool while `load` does the rest.
        """
        from worker.engines import make_pool
        from worker.events import EventSender
        from worker.parallel.actor import load

        if self._handle is not None:
            return self._handle
        config, started = self._config, time.perf_counter()
        self._model = load(config)
        self._pool, handle = make_pool(self._model, config)
        self._sender = EventSender(config.name, self._wire)
        handle = replace(handle, node_id=ray.get_runtime_context().get_node_id())
        if config.takes_remote_pages != "no":
            from worker.handoff.receiver import Receiver

            host = "127.0.0.1"
            if config.takes_remote_pages == "node":
                host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            self._receiver = Receiver(self._pool, name=config.name, host=host)
            handle = replace(handle, endpoint=self._receiver.endpoint)
        self._handle, self._load_seconds = handle, time.perf_counter() - started
        return handle

    def _load(self) -> DecodeWorkerInfo:
        from worker import startup
        from worker.engines import make_decode

        config, handle = self._config, self.make_pool()
        started, model = time.perf_counter(), self._model
        self._engine, reports = make_decode(model, self._pool, config)
        startup.log_buckets(config.name, model, reports)
        self._figures = WorkerFigures("decode", config.name, model=config.model_name)
        return DecodeWorkerInfo(
            name=config.name,
            model=model.info,
            pool=handle,
            max_num_seqs=config.max_num_seqs,
            device=model.device.type,
            load_seconds=self._load_seconds + time.perf_counter() - started,
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

        self._wire.handle(SCHEDULER_NAME)  # kept: no step is to fail because the scheduler has just ended
        numbers = count(1)
        with self._stepping:
            try:
                while self._obey():
                    outcome = self._engine.step()
                    self._sender.send(outcome.events)
                    report = self._report(outcome, run_id, next(numbers))
                    self._wire.post(SCHEDULER_NAME, "step_done", report)
                    self._figures.stepped(report)
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
            # The scheduler has no use for logprobs, which are by far the largest part where they are wanted, nor
            # for what it said itself.
            events=tuple(
                event
                if event.logprobs is None and event.timing is None
                else replace(event, logprobs=None, timing=None)
                for _, event in outcome.events
            ),
            released=tuple(outcome.released),
            num_stalled=outcome.num_stalled,
            bucket=outcome.bucket,
            eager_reason=outcome.eager_reason,
            number=number,
            run_id=run_id,
        )
