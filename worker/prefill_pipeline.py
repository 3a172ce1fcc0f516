"""The threads of a prefill worker: one gives batches to the engine, one takes their results."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from scheduler.messages import PrefillBatch, PrefillResult
from worker.prefill_plan import Known, Started


class PrefillSteps(Protocol):
    """What is done with a batch. An error that one of these raises leaves the process unable to go on."""

    def pause_s(self) -> float | None:
        """Return how long the device is decode's alone before the next batch; None if it may be started ahead."""

    def begin(self, batch: PrefillBatch) -> Started:
        """Start a batch. Called in the thread that also carries out calls."""

    def recover(self, batch: PrefillBatch, error: Exception) -> PrefillResult:
        """Compute a batch again of which the result could not be had. In the same thread, with nothing under way."""

    def finish(
        self, batch: PrefillBatch, result: PrefillResult, *, waited_s: float, prefill_s: float
    ) -> PrefillResult:
        """Tell others of a result, and return what the scheduler is to have of it.

        The batch waited `waited_s` for the one before it, and then took `prefill_s`. In the order of the batches.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    batch: PrefillBatch
    answer: Future[PrefillResult]
    came_at: float
    error: Exception | None = None
    """What became of the first attempt to compute it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    call: Callable[[], Any]
    answer: Future[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnderWay:
    job: _Batch
    started: Started


class PrefillPipeline:
    """Owns the order in which a prefill worker does things: as they come, whichever way.

    On a GPU a batch is started while the one before it is computed. Calls have the engine for themselves.
    """

    def __init__(self, steps: PrefillSteps, *, fail: Callable[[Exception], Any]) -> None:
        """`fail` is called with an error after which the process cannot go on."""
        self._steps = steps
        self._fail = fail
        self._inbox: queue.SimpleQueue[_Batch | _Call | None] = queue.SimpleQueue()
        """None: look at those that failed."""
        self._failed: deque[_Batch] = deque()
        """Batches of which the result could not be had. They come before all that is in the inbox."""
        self._under_way: queue.SimpleQueue[_UnderWay] = queue.SimpleQueue()
        self._num_under_way = 0
        self._taken = threading.Condition()
        self._done_at = float("-inf")
        for name, run in (("prefill", self._start_all), ("results", self._take_all)):
            threading.Thread(target=run, name=name, daemon=True).start()

    def submit(self, batch: PrefillBatch) -> Future[PrefillResult]:
        """Have a batch computed after all that came before it."""
        job = _Batch(batch=batch, answer=Future(), came_at=time.perf_counter())
        self._inbox.put(job)
        return job.answer

    def call(self, call: Callable[[], Any]) -> Any:
        """Return what `call` returns, or raise what it raises, once all that came before is done."""
        job = _Call(call=call, answer=Future())
        self._inbox.put(job)
        return job.answer.result()

    def wait_until_idle(self) -> None:
        """Wait until the results of all batches that were started are taken. For the thread that starts them."""
        with self._taken:
            self._taken.wait_for(lambda: self._num_under_way == 0)

    def _start_all(self) -> None:
        while True:
            job = self._inbox.get()
            if job is None:
                self._start_failed()
            elif isinstance(job, _Batch):
                self._start_one(job)
            else:
                self.wait_until_idle()
                while self._failed:
                    self._start_failed()
                    self.wait_until_idle()
                _resolve(job)

    def _start_failed(self) -> None:
        while self._failed:
            self._start_one(self._failed.popleft())

    def _start_one(self, job: _Batch) -> None:
        try:
            started = self._start(job)
        except Exception as error:
            self._fail(error)
        else:
            with self._taken:
                self._num_under_way += 1
            self._under_way.put(_UnderWay(job=job, started=started))

    def _start(self, job: _Batch) -> Started:
        error = job.error
        if error is None:
            if self._steps.pause_s() is not None:
                self.wait_until_idle()  # The pause counts from the end of the batch before.
                time.sleep(self._steps.pause_s() or 0.0)
            try:
                return self._steps.begin(job.batch)
            except Exception as raised:
                error = raised
        self.wait_until_idle()
        return Known(self._steps.recover(job.batch, error))

    def _take_all(self) -> None:
        while True:
            under_way = self._under_way.get()
            try:
                self._take(under_way.job, under_way.started)
            except Exception as error:
                self._fail(error)

    def _take(self, job: _Batch, started: Started) -> None:
        try:
            result = started.result()
        except Exception as error:
            self._failed.append(_Batch(batch=job.batch, answer=job.answer, came_at=job.came_at, error=error))
            # Not earlier: a call that waits for what came before it waits for this one, too.
            self._is_taken()
            self._inbox.put(None)
            return
        begun_at, self._done_at = max(job.came_at, self._done_at), time.perf_counter()
        answer = self._steps.finish(
            job.batch, result, waited_s=begun_at - job.came_at, prefill_s=self._done_at - begun_at
        )
        self._is_taken()
        job.answer.set_result(answer)

    def _is_taken(self) -> None:
        with self._taken:
            self._num_under_way -= 1
            self._taken.notify_all()


def _resolve(job: _Call) -> None:
    try:
        job.answer.set_result(job.call())
    except Exception as error:
        job.answer.set_exception(error)
