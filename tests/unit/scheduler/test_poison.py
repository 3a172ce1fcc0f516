"""A request that kills workers fails alone; one that was only there when a worker died does not."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from scheduler.actions import SendDecodeStarts, SendEvents, SendPrefill
from scheduler.core import SchedulerCore
from scheduler.messages import (
    DecodeStart,
    PrefillBatch,
    PrefillOutcome,
    PrefillResult,
    Request,
    SamplingParams,
    SequenceRef,
    StepReport,
    TokenEvent,
)
from tests.unit.scheduler.test_core_machine import Ends, decode_info, make_core, prefill_info, token


class Service:
    """A core with one worker of each kind. Those of `poison` kill the prefill worker, and it comes back."""

    def __init__(self, poison: Collection[str] = (), *, finishes: bool = False) -> None:
        self.ends = Ends()
        self.core: SchedulerCore = make_core(self.ends)
        self.core.add_prefill_worker(prefill_info("prefill-0"))
        self.core.add_decode_worker(decode_info("decode-0"))
        self.poison = poison
        self.finishes = finishes  # the decode worker ends what it starts
        self.batches: list[list[str]] = []
        self.errors: dict[str, str] = {}
        self.epochs: dict[str, int] = {}
        self.num_deaths = 0
        self.num_reports = 0

    def submit(self, *names: str) -> None:
        for name in names:
            request = Request(
                request_id=name,
                api_server="api-0",
                prompt_token_ids=(1, 2),
                sampling=SamplingParams(max_tokens=12),
            )
            assert self.core.submit([request], 0.0) is None

    def run(self) -> None:
        """Prefill what can be prefilled."""
        while actions := self.core.tick(1.0):
            for action in actions:
                if isinstance(action, SendEvents):
                    self.errors |= {e.request_id: str(e.error_message) for e in action.events.events}
                if isinstance(action, SendDecodeStarts):
                    self.epochs |= {start.request.request_id: start.lease.epoch for start in action.starts}
                    for start in action.starts if self.finishes else ():
                        self.finish(start)
                if isinstance(action, SendPrefill):
                    self.prefill(action.batch)

    def prefill(self, batch: PrefillBatch) -> None:
        names = [item.request.request_id for item in batch.items]
        self.batches.append(names)
        if not set(self.poison).isdisjoint(names):
            self.num_deaths += 1
            self.core.worker_lost("prefill-0", 1.0, returns=True)
            self.submit(f"while-away-{self.num_deaths}")
            self.core.add_prefill_worker(prefill_info("prefill-0"))
            return
        outcomes = tuple(
            PrefillOutcome(
                request_id=item.request.request_id, token_id=token(len(item.request.output_token_ids))
            )
            for item in batch.items
        )
        result = PrefillResult(
            batch_id=batch.batch_id,
            worker="prefill-0",
            outcomes=outcomes,
            num_tokens=1,
            padding_tokens=0,
            replays={},
        )
        self.core.prefill_done(result, 1.0)

    def decode(self, name: str, start: int, stop: int) -> None:
        """The decode worker makes tokens of a request, from one index to before another."""
        events = tuple(
            TokenEvent(request_id=name, index=i, epoch=self.epochs[name], token_id=token(i))
            for i in range(start, stop)
        )
        self.num_reports += 1
        report = StepReport(
            worker="decode-0", seconds=0.0, events=events, released=(), number=self.num_reports
        )
        self.core.step_done(report, 1.0)

    def finish(self, start: DecodeStart) -> None:
        name, epoch = start.request.request_id, start.lease.epoch
        index = len(start.request.output_token_ids) + 1
        event = TokenEvent(
            request_id=name, index=index, epoch=epoch, token_id=token(index), finish_reason="stop"
        )
        self.num_reports += 1
        report = StepReport(
            worker="decode-0",
            seconds=0.0,
            events=(event,),
            released=(SequenceRef(request_id=name, epoch=epoch),),
            number=self.num_reports,
        )
        self.core.step_done(report, 1.0)

    def decode_worker_dies(self) -> None:
        self.core.worker_lost("decode-0", 1.0, returns=True)
        self.core.add_decode_worker(decode_info("decode-0"))
        self.num_reports = 0
        self.run()


def test_poison_in_a_batch_fails_alone() -> None:
    service = Service(poison=["bad"], finishes=True)
    service.submit("good", "bad", "fine")
    service.run()
    assert list(service.errors) == ["bad"]
    assert "the worker number 3 in a row" in service.errors["bad"]
    assert service.batches[0] == ["good", "bad", "fine"]
    assert service.num_deaths == 3
    assert ["good"] in service.batches
    assert ["bad"] in service.batches
    assert service.ends.outcomes.pop("bad") == ["worker_failed"]
    assert service.ends.outcomes.keys() >= {"good", "fine"}
    assert set(map(tuple, service.ends.outcomes.values())) == {("stop",)}


def test_poison_that_was_the_only_one_at_two_deaths_fails_at_the_second() -> None:
    service = Service(poison=["bad"])
    service.submit("bad")
    service.run()
    assert (service.num_deaths, list(service.errors)) == (2, ["bad"])
    assert service.ends.outcomes == {"bad": ["worker_failed"]}


@pytest.mark.parametrize(("num_proven", "fails"), [(10, False), (2, True)])
def test_deaths_with_progress_between_them_are_not_in_a_row(num_proven: int, fails: bool) -> None:
    service = Service()
    service.submit("long")
    service.run()
    service.decode_worker_dies()  # It goes on at index 1, which prefill makes now.
    service.decode("long", 2, 2 + num_proven)
    service.decode_worker_dies()
    assert ("long" in service.errors) == fails


def test_suspects_are_computed_one_after_the_other() -> None:
    service = Service()
    service.submit("a", "b")
    service.run()
    service.decode_worker_dies()
    service.decode_worker_dies()
    assert service.batches[-3:] == [["a", "b"], ["a", "b"], ["a"]]
    service.submit("c")
    service.run()
    assert service.batches[-1] == ["c"]  # Others go on.
    service.decode("a", 3, 12)
    service.run()
    assert service.batches[-1] == ["b"]
    assert service.core.num_waiting == 0


def test_without_workers_requests_wait_until_it_is_certain_that_none_comes() -> None:
    service = Service()
    service.core.worker_lost("prefill-0", 1.0, returns=True)
    service.core.worker_lost("decode-0", 1.0, returns=True)
    service.submit("patient")
    service.run()
    assert (service.core.num_waiting, service.errors) == (1, {})
    service.core.worker_gone("decode-0", 1.0)
    service.run()
    assert list(service.errors) == ["patient"]
