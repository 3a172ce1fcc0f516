"""Two batches in flight at a prefill worker: order, and who has the engine when."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from scheduler.errors import WorkerFailedError
from scheduler.messages import PrefillBatch, PrefillResult
from worker.prefill_pipeline import PrefillPipeline
from worker.prefill_plan import Started, failed_result


def batch(number: int) -> PrefillBatch:
    return PrefillBatch(batch_id=number, decode_worker="decode-0", items=())


def empty_result(number: int) -> PrefillResult:
    return failed_result("prefill-0", batch(number), WorkerFailedError("nothing"))


@dataclass
class OnDevice:
    """A batch on a device that computes it until `ends` is set."""

    number: int
    error: Exception | None
    ends: threading.Event = field(default_factory=threading.Event)

    def result(self) -> PrefillResult:
        assert self.ends.wait(60)
        if self.error is not None:
            raise self.error
        return empty_result(self.number)


class Device:
    """The steps of a worker whose device takes any number of batches, and ends each when it is told to."""

    def __init__(self, *failing: int, cannot_go_on: bool = False) -> None:
        self.begun: queue.SimpleQueue[OnDevice] = queue.SimpleQueue()
        self.log: list[str] = []
        self.waits: dict[int, float] = {}
        self.is_paced = False
        self._failing = failing
        self._cannot_go_on = cannot_go_on

    def pause_s(self) -> float | None:
        return 0.0 if self.is_paced else None

    def begin(self, batch: PrefillBatch) -> Started:
        self.log.append(f"begin {batch.batch_id}")
        error = RuntimeError("bad") if batch.batch_id in self._failing else None
        started = OnDevice(batch.batch_id, error)
        self.begun.put(started)
        return started

    def recover(self, batch: PrefillBatch, error: Exception) -> PrefillResult:
        self.log.append(f"recover {batch.batch_id}")
        if self._cannot_go_on:
            raise error
        return empty_result(batch.batch_id)

    def finish(
        self, batch: PrefillBatch, result: PrefillResult, *, waited_s: float, prefill_s: float
    ) -> PrefillResult:
        self.log.append(f"finish {batch.batch_id}")
        assert waited_s >= 0
        assert prefill_s >= 0
        self.waits[batch.batch_id] = waited_s
        return result

    def next(self) -> OnDevice:
        return self.begun.get(timeout=60)


def must_go_on(error: Exception) -> None:
    raise error


def pipeline_of(device: Device, fail: Callable[[Exception], None] = must_go_on) -> PrefillPipeline:
    return PrefillPipeline(device, fail=fail)


def test_the_next_batch_begins_while_one_is_computed_and_waits_are_told_apart() -> None:
    device = Device()
    pipeline = pipeline_of(device)
    answers = [pipeline.submit(batch(number)) for number in (1, 2)]
    first, second = device.next(), device.next()
    assert not any(answer.done() for answer in answers)
    second.ends.set()  # Results come in order all the same.
    first.ends.set()
    assert [answer.result(60).batch_id for answer in answers] == [1, 2]
    assert device.log == ["begin 1", "begin 2", "finish 1", "finish 2"]
    assert device.waits[1] == 0
    assert device.waits[2] > 0  # until the first had ended
    alone = pipeline.submit(batch(3))
    device.next().ends.set()
    alone.result(60)
    assert device.waits[3] == 0


def test_no_batch_is_started_ahead_while_decode_is_to_have_a_share_of_the_device() -> None:
    device = Device()
    device.is_paced = True
    pipeline = pipeline_of(device)
    answers = [pipeline.submit(batch(number)) for number in (1, 2)]
    device.next().ends.set()
    device.next().ends.set()
    assert [answer.result(60).batch_id for answer in answers] == [1, 2]
    assert device.log == ["begin 1", "finish 1", "begin 2", "finish 2"]


def test_a_call_has_the_engine_for_itself_in_its_turn() -> None:
    device = Device()
    pipeline = pipeline_of(device)
    first = pipeline.submit(batch(1))
    started = device.next()
    caller = threading.Thread(target=pipeline.call, args=(lambda: device.log.append("call"),))
    caller.start()
    started.ends.set()
    caller.join(60)
    assert first.done()
    second = pipeline.submit(batch(2))
    device.next().ends.set()
    second.result(60)
    assert device.log == ["begin 1", "finish 1", "call", "begin 2", "finish 2"]
    with pytest.raises(ZeroDivisionError):
        pipeline.call(lambda: 1 / 0)


def test_a_batch_that_fails_is_computed_again_with_nothing_else_under_way() -> None:
    device = Device(1)
    pipeline = pipeline_of(device)
    answers = [pipeline.submit(batch(number)) for number in (1, 2)]
    first, second = device.next(), device.next()
    first.ends.set()
    second.ends.set()
    assert [answer.result(60).batch_id for answer in answers] == [1, 2]
    assert device.log == ["begin 1", "begin 2", "finish 2", "recover 1", "finish 1"]


def test_a_call_waits_for_a_batch_before_it_that_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that takes over gives pages to others once such a call is back."""
    is_called = threading.Event()

    class Noting(Future[Any]):
        def result(self, timeout: float | None = None) -> Any:
            is_called.set()
            return super().result(timeout)

    monkeypatch.setattr("worker.prefill_pipeline.Future", Noting)
    device = Device(1)
    pipeline = pipeline_of(device)
    answer = pipeline.submit(batch(1))
    started = device.next()
    caller = threading.Thread(target=pipeline.call, args=(lambda: device.log.append("call"),))
    caller.start()
    assert is_called.wait(60)
    started.ends.set()
    caller.join(60)
    assert answer.result(60).batch_id == 1
    assert device.log == ["begin 1", "recover 1", "finish 1", "call"]


def test_an_error_after_which_the_process_cannot_go_on_is_told() -> None:
    failures: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    device = Device(1, cannot_go_on=True)
    pipeline = pipeline_of(device, failures.put)
    pipeline.submit(batch(1))
    device.next().ends.set()
    assert str(failures.get(timeout=60)) == "bad"
