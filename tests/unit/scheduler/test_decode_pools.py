"""Growth and preemption: who gets pages, who leaves, and what a late report is worth."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import count

import pytest

from scheduler.actions import SendDecodeCancel, SendPrefill
from scheduler.decode_pools import DecodePool, DecodePools, num_start_pages
from scheduler.errors import ConfigError
from scheduler.messages import (
    PrefillOutcome,
    PrefillResult,
    Request,
    SamplingParams,
    SequenceRef,
    StepReport,
    TokenEvent,
)
from tests.unit.scheduler.test_core_machine import (
    PAGE_SIZE,
    Ends,
    decode_info,
    make_core,
    prefill_info,
    prefix_of,
    token,
)


def request(name: str, num_prompt: int, max_tokens: int) -> Request:
    return Request(
        request_id=name,
        api_server="api-0",
        prompt_token_ids=(1,) * num_prompt,
        sampling=SamplingParams(max_tokens=max_tokens),
    )


class Sequences:
    """Sequences in the pool of decode-0, which has 12 pages of 4 tokens."""

    def __init__(self) -> None:
        self.pool = DecodePool(decode_info("decode-0"), count(1))
        self.tokens: dict[SequenceRef, int] = {}
        self.pages: dict[SequenceRef, int] = {}

    def begin(self, num_prompt: int, max_tokens: int) -> SequenceRef:
        new = request(f"r{len(self.tokens)}", num_prompt, max_tokens)
        lease = self.pool.lease(new, num_start_pages(new, PAGE_SIZE), age=len(self.tokens))
        ref = SequenceRef(request_id=new.request_id, epoch=lease.epoch)
        self.tokens[ref], self.pages[ref] = num_prompt + 1, len(lease.page_ids)
        return ref

    def has_room(self, ref: SequenceRef) -> bool:
        return self.tokens[ref] <= self.pages[ref] * PAGE_SIZE

    def step(self, *refs: SequenceRef) -> list[SequenceRef]:
        """Make a token for those that have room; return those that must leave."""
        for ref in refs:
            if self.has_room(ref):
                self.tokens[ref] += 1
                self.pool.advance(ref, self.tokens[ref])
        balance = self.pool.balance()
        for grant in balance.grants:
            assert grant.first_page == self.pages[grant.ref]
            self.pages[grant.ref] += len(grant.page_ids)
        return balance.preempted


def test_a_sequence_begins_small_and_is_granted_pages_long_before_it_needs_them() -> None:
    sequences = Sequences()
    ref = sequences.begin(num_prompt=4, max_tokens=44)
    assert sequences.pages[ref] == 6, "prompt, one token, and 16 more"
    for _ in range(43):
        assert sequences.step(ref) == []
        room = sequences.pages[ref] * PAGE_SIZE - sequences.tokens[ref]
        assert room >= min(16, 48 - sequences.tokens[ref])
    assert sequences.pool.ledger.free_pages == 0


def test_while_half_of_the_pool_is_free_four_pages_are_granted_at_once() -> None:
    sequences = Sequences()
    ref = sequences.begin(num_prompt=1, max_tokens=44)
    granted = [sequences.pages[ref]]
    for _ in range(43):
        sequences.step(ref)
        if sequences.pages[ref] != granted[-1]:
            granted.append(sequences.pages[ref])
    assert granted == [5, 9, 10, 11, 12]
    short = Sequences()
    ref = short.begin(num_prompt=1, max_tokens=24)
    while short.tokens[ref] < 25:
        short.step(ref)
    assert short.pages[ref] == 7, "no more than it can ever fill"


def test_the_younger_leaves_when_a_page_is_needed_now_and_not_before() -> None:
    sequences = Sequences()
    older, younger = (sequences.begin(num_prompt=4, max_tokens=44) for _ in range(2))
    assert sequences.pool.ledger.free_pages == 0
    for _ in range(17):
        assert sequences.step(older, younger) == [], "there is room yet, and one of them may end"
    assert sequences.pool.free_pages == 0
    assert sequences.step(older, younger) == [younger]
    for _ in range(4):
        assert sequences.step(older) == [], "nobody else leaves while pages are on their way back"
    assert not sequences.has_room(older)
    sequences.pool.release(younger)
    while sequences.tokens[older] < 48:
        assert sequences.step(older) == []
        assert sequences.has_room(older)


def test_pages_are_kept_for_those_that_grow() -> None:
    sequences = Sequences()
    ref = sequences.begin(num_prompt=4, max_tokens=44)
    sequences.begin(num_prompt=4, max_tokens=1)
    assert sequences.pool.ledger.free_pages == 4
    assert sequences.pool.free_pages == 3, "the first is going to need more"
    sequences.pool.leave(ref)
    assert sequences.pool.free_pages == 4


def test_pages_of_another_size_are_refused() -> None:
    pools = DecodePools()
    pools.add(decode_info("decode-0"))
    info = decode_info("decode-1")
    with pytest.raises(ConfigError, match=r"page_size of decode-1 must be 4, .* got 8"):
        pools.add(replace(info, pool=replace(info.pool, page_size=8)))


class Driver:
    """A core with one prefill worker, whose batches come back at once."""

    def __init__(self, *decode_workers: str) -> None:
        self.reads_cached = True
        self.ends = Ends()
        self.core = make_core(self.ends)
        self.core.add_prefill_worker(prefill_info("prefill-0"))
        for name in decode_workers:
            self.core.add_decode_worker(decode_info(name))
        self.leases: dict[str, tuple[str, int]] = {}
        self.cancelled: list[str] = []
        self.num_reports: Counter[str] = Counter()

    def submit(self, new: Request) -> None:
        assert self.core.submit([new], 0.0) is None
        self.pump()

    def pump(self) -> None:
        for action in self.core.tick(1.0):
            if isinstance(action, SendDecodeCancel):
                self.cancelled += [ref.request_id for ref in action.refs]
            if not isinstance(action, SendPrefill):
                continue
            outcomes = []
            for item in action.batch.items:
                self.leases[item.request.request_id] = (item.lease.decode_worker, item.lease.epoch)
                index = len(item.request.output_token_ids)
                num_cached = len(item.lease.shared_epochs) * PAGE_SIZE if self.reads_cached else 0
                outcomes.append(
                    PrefillOutcome(
                        request_id=item.request.request_id,
                        token_id=token(index),
                        num_cached_tokens=num_cached,
                    )
                )
            result = PrefillResult(
                batch_id=action.batch.batch_id,
                worker=action.worker,
                outcomes=tuple(outcomes),
                num_tokens=1,
                padding_tokens=0,
                replays={},
            )
            self.core.prefill_done(result, 1.0)
            self.pump()

    def report(
        self, name: str, index: int | None, *, epoch: int | None = None, released: bool = False
    ) -> None:
        """A decode worker reports a token of a sequence, or that it touches its pages no more, or both."""
        worker, own_epoch = self.leases[name]
        event = TokenEvent(
            request_id=name, index=index or 0, epoch=epoch or own_epoch, token_id=token(index or 0)
        )
        ref = SequenceRef(request_id=name, epoch=own_epoch)
        self.num_reports[worker] += 1
        report = StepReport(
            worker=worker,
            seconds=0.0,
            events=(event,) if index is not None else (),
            released=(ref,) if released else (),
            number=self.num_reports[worker],
        )
        self.core.step_done(report, 1.0)
        self.pump()


def test_a_sequence_that_outgrows_its_pool_moves_to_a_larger_one() -> None:
    driver = Driver("decode-0", "decode-1")
    driver.submit(request("first", 4, 44))
    driver.submit(request("second", 4, 40))
    assert driver.leases["first"][0] == "decode-0"
    assert driver.leases["second"][0] == "decode-1", "which has 24 tokens of room"
    index = 0
    while not driver.cancelled:
        index += 1
        driver.report("second", index)
    assert driver.cancelled == ["second"]
    driver.core.cancel("first", 1.0)
    driver.report("first", None, released=True)
    driver.report("second", index + 1, released=True)
    assert driver.ends.requeues["preempted"] == 1
    assert driver.leases["second"][0] == "decode-0"


def test_a_late_event_of_an_old_lease_is_counted_and_changes_nothing() -> None:
    driver = Driver("decode-0")
    driver.submit(request("r", 4, 40))
    _, old_epoch = driver.leases["r"]
    driver.report("r", 1)
    driver.report("r", None, released=True)  # it was refused: it did not end, and nobody cancelled it
    assert driver.ends.requeues["stale_lease"] == driver.ends.refusals["read"] == 1
    _, epoch = driver.leases["r"]
    assert epoch > old_epoch
    driver.report("r", 9, epoch=old_epoch)
    assert driver.ends.refusals["event"] == 1
    driver.report("r", 3)
    assert driver.core.num_live == 1


def test_a_request_that_two_dying_workers_had_fails() -> None:
    """It may be what kills them."""
    driver = Driver("decode-0", "decode-1", "decode-2")
    driver.submit(request("r", 4, 12))
    driver.core.worker_lost(driver.leases["r"][0], 1.0)
    driver.pump()
    assert driver.ends.outcomes == {}
    driver.core.worker_lost(driver.leases["r"][0], 1.0)
    assert driver.ends.outcomes == {"r": ["worker_failed"]}


@pytest.mark.parametrize("reads_cached", [True, False])
def test_a_worker_that_does_not_see_cached_pages_shows_it(reads_cached: bool) -> None:
    """Then nobody waits for what it computes, and requests count with all their tokens."""
    driver = Driver("decode-0")
    driver.reads_cached = reads_cached
    prompt = (1,) * 20
    requests = [
        replace(request(name, 20, 1), prompt_token_ids=prompt, prefix=prefix_of(prompt, salt=0))
        for name in "abc"
    ]
    for name, new in zip("ab", requests, strict=False):
        driver.submit(new)
        driver.core.cancel(name, 1.0)
        driver.report(name, None, released=True)
    assert driver.core.submit([requests[2]], 1.0) is None
    assert driver.core.num_waiting_tokens == (4 if reads_cached else 20)
