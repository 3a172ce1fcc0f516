"""A prefill worker gets its next batch while it computes one: when, and what becomes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.actions import Action, ReleaseWorker, SendPrefill
from scheduler.core import SchedulerCore
from scheduler.messages import PrefillBatch, PrefillOutcome, PrefillResult, Request, SamplingParams
from tests.unit.scheduler.test_core_machine import TIMEOUT_S, Ends, decode_info, make_core, prefill_info

SHORT_S, LONG_S = 0.1, 1.0
"""What a batch of up to 16 tokens takes, and one of up to 64."""


def started(*, num_workers: int = 1) -> tuple[SchedulerCore, Ends]:
    ends = Ends()
    core = make_core(ends)
    for i in range(num_workers):
        info = prefill_info(f"prefill-{i}")
        core.add_prefill_worker(replace(info, bucket_seconds={"16x4": SHORT_S, "64x4": LONG_S}))
    for name in ("decode-0", "decode-3"):
        info_of_pool = decode_info(name)
        pool = replace(info_of_pool.pool, num_pages=1001)
        core.add_decode_worker(replace(info_of_pool, pool=pool, max_num_seqs=64))
    return core, ends


def submit(core: SchedulerCore, prefix: str, count: int, now: float, *, num_tokens: int = 4) -> list[Action]:
    group = [
        Request(
            request_id=f"{prefix}{i}",
            api_server="api-0",
            prompt_token_ids=(1,) * num_tokens,
            sampling=SamplingParams(max_tokens=1),
        )
        for i in range(count)
    ]
    assert core.submit(group, now) is None
    return core.tick(now)


def sent(actions: list[Action]) -> list[PrefillBatch]:
    return [action.batch for action in actions if isinstance(action, SendPrefill)]


def ids(batch: PrefillBatch) -> list[str]:
    return [item.request.request_id for item in batch.items]


def result(batch: PrefillBatch, worker: str = "prefill-0") -> PrefillResult:
    return PrefillResult(
        batch_id=batch.batch_id,
        worker=worker,
        outcomes=tuple(
            PrefillOutcome(request_id=request_id, token_id=1, finish_reason="length")
            for request_id in ids(batch)
        ),
        num_tokens=1,
        padding_tokens=0,
        replays={},
        seconds=SHORT_S,
    )


def test_a_full_batch_is_sent_ahead_shortly_before_its_worker_is_idle_and_a_third_is_not() -> None:
    core, _ = started()
    (first,) = sent(submit(core, "a", 4, 0.0))
    assert sent(submit(core, "b", 6, 0.001)) == []
    wake_at = core.wake_at() or 0.0
    assert wake_at == pytest.approx(SHORT_S - 0.01)
    (second,) = sent(core.tick(wake_at))
    assert ids(second) == ["b0", "b1", "b2", "b3"]
    assert sent(submit(core, "c", 4, SHORT_S)) == []
    assert core.wake_at() is None
    # With the first result the worker has one batch again, and 10 ms before that is done it gets the next.
    core.prefill_done(result(first), SHORT_S)
    assert sent(core.tick(SHORT_S)) == []
    wake_at = core.wake_at() or 0.0
    assert wake_at == pytest.approx(2 * SHORT_S - 0.01)
    (third,) = sent(core.tick(wake_at))
    assert ids(third) == ["b4", "b5", "c0", "c1"]


def test_a_batch_that_others_could_join_waits_until_its_worker_is_as_good_as_idle() -> None:
    core, _ = started()
    submit(core, "a", 4, 0.0)
    assert sent(submit(core, "b", 3, SHORT_S - 0.01 - TIMEOUT_S)) == []  # times out while the worker is busy
    assert sent(core.tick(SHORT_S - 0.01)) == []
    wake_at = core.wake_at() or 0.0
    assert wake_at == pytest.approx(SHORT_S - 0.001)
    (batch,) = sent(core.tick(wake_at))
    assert ids(batch) == ["b0", "b1", "b2"]
    # All of its wait was for a worker.
    assert [item.held_s for item in batch.items] == [0.0] * 3
    assert batch.items[0].queued_s == pytest.approx(0.009 + TIMEOUT_S)


def test_a_batch_within_its_hold_is_held_though_its_worker_is_about_to_be_idle() -> None:
    core, _ = started()
    (first,) = sent(submit(core, "a", 4, 0.0))
    assert sent(submit(core, "b", 3, SHORT_S - 0.001)) == []
    assert core.wake_at() == pytest.approx(SHORT_S - 0.001 + TIMEOUT_S)
    core.prefill_done(result(first), SHORT_S)
    assert sent(core.tick(SHORT_S)) == []
    assert core.wake_at() == pytest.approx(SHORT_S - 0.001 + TIMEOUT_S)


def test_no_half_empty_batch_is_sent_behind_one_that_takes_longer_than_expected() -> None:
    core, _ = started()
    submit(core, "a", 4, 0.0)
    assert sent(submit(core, "b", 3, SHORT_S + 0.01)) == []
    assert sent(core.tick(SHORT_S + 10)) == []
    (batch,) = sent(submit(core, "c", 1, SHORT_S + 10))
    assert ids(batch) == ["b0", "b1", "b2", "c0"]


def test_nothing_is_sent_ahead_while_a_worker_is_idle() -> None:
    core, _ = started(num_workers=2)
    first, second = (
        next(a.worker for a in submit(core, prefix, 4, 0.09) if isinstance(a, SendPrefill)) for prefix in "ab"
    )
    assert {first, second} == {"prefill-0", "prefill-1"}


def test_both_batches_of_a_worker_that_dies_are_computed_again() -> None:
    core, ends = started()
    submit(core, "a", 4, 0.0)
    (second,) = sent(submit(core, "b", 4, SHORT_S))
    assert core.working == {"prefill-0"}
    core.worker_lost("prefill-0", SHORT_S, returns=True)
    assert core.num_waiting == 8
    assert ends.requeues == {"worker_lost": 8}
    assert all(ledger.num_leases == 0 for ledger in core.ledgers)
    core.add_prefill_worker(prefill_info("prefill-0"))
    again = sent(core.tick(SHORT_S))
    assert sorted(i for batch in again for i in ids(batch)) == [
        f"{prefix}{i}" for prefix in "ab" for i in range(4)
    ]
    assert all(batch.batch_id > second.batch_id for batch in again)
    assert ends.outcomes == {}


def test_a_worker_that_is_to_leave_does_so_after_its_second_batch() -> None:
    core, _ = started(num_workers=1)
    (first,) = sent(submit(core, "a", 4, 0.0))
    (second,) = sent(submit(core, "b", 4, SHORT_S))
    core.drain_worker("prefill-0")
    core.prefill_done(result(first), SHORT_S)
    assert core.tick(SHORT_S) == []
    core.prefill_done(result(second), 2 * SHORT_S)
    assert core.tick(2 * SHORT_S) == [ReleaseWorker(worker="prefill-0")]


def test_results_that_overtake_each_other_are_told_apart() -> None:
    core, ends = started()
    (first,) = sent(submit(core, "a", 4, 0.0))
    (second,) = sent(submit(core, "b", 4, SHORT_S))
    core.prefill_done(result(second), SHORT_S)
    assert ends.outcomes.keys() == set(ids(second))
    core.prefill_done(result(first), SHORT_S)
    assert ends.outcomes.keys() == {*ids(first), *ids(second)}
    assert core.working == set()


def test_a_suspect_waits_for_a_worker_that_has_nothing_else_to_do() -> None:
    core, ends = started()
    assert sent(submit(core, "a", 2, 0.0)) == []
    now = TIMEOUT_S
    for _ in range(2):
        (batch,) = sent(core.tick(now))
        assert ids(batch) == ["a0", "a1"]
        core.worker_lost("prefill-0", now, returns=True)
        core.add_prefill_worker(prefill_info("prefill-0"))
        now += 1.0
    (alone,) = sent(core.tick(now))
    assert ids(alone) == ["a0"]
    # Neither the other suspect nor a full batch is sent behind it, nor is it passed while it waits.
    assert sent(submit(core, "b", 4, now)) == []
    core.prefill_done(result(alone), now)
    (other,) = sent(core.tick(now))
    assert ids(other) == ["a1"]
    core.prefill_done(result(other), now)
    (rest,) = sent(core.tick(now))
    assert ids(rest) == ["b0", "b1", "b2", "b3"]
    assert core.num_live == 4
    assert set(ends.outcomes) == {"a0", "a1"}
