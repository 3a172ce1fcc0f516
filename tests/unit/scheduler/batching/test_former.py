import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.batching.adaptive import AdaptivePolicy
from scheduler.batching.former import BatchFormer
from scheduler.batching.policies import FixedPolicy
from scheduler.batching.requests import FormedBatch
from tests.unit.scheduler.batching.helpers import h200_model, queued

PLENTY = 10**6


def fixed(
    *, max_requests: int = 8, timeout_s: float = 0.02, max_tokens: int | None = None, **options: float
) -> BatchFormer:
    cost = h200_model()
    policy = FixedPolicy(
        max_requests=max_requests, timeout_s=timeout_s, max_tokens=max_tokens, cost_model=cost
    )
    return BatchFormer(policy, cost, **options)  # type: ignore[arg-type]


def form(
    former: BatchFormer, now: float, *, pages: int = PLENTY, sequences: int = PLENTY
) -> FormedBatch | None:
    return former.form(now, free_pages=pages, free_sequences=sequences)


def ids(formed: FormedBatch | None) -> list[str]:
    return [] if formed is None else [request.request_id for request in formed.requests]


# When a batch leaves.


def test_eight_leave_at_once_and_seven_wait_for_the_oldest_ones_timeout() -> None:
    former = fixed()
    for i in range(7):
        former.add(queued(f"r{i}", at=i * 0.002))
        assert form(former, i * 0.002) is None
        assert former.wake_at() == pytest.approx(0.02)  # new arrivals do not restart the clock
    assert form(former, 0.0199) is None
    formed = form(former, 0.02)
    assert formed is not None
    assert (len(formed.requests), formed.reason) == (7, "timeout")

    for i in range(8):
        former.add(queued(f"s{i}", at=1.0))
    formed = form(former, 1.0)
    assert formed is not None
    assert (len(formed.requests), formed.reason) == (8, "full")
    assert form(former, 1.0) is None
    assert former.wake_at() is None


def test_the_token_trigger() -> None:
    former = fixed(max_tokens=256)
    former.add(queued("a", 100))
    former.add(queued("b", 100))
    assert form(former, 0.0) is None
    former.add(queued("c", 100))
    formed = form(former, 0.0)
    assert formed is not None
    assert (ids(formed), formed.reason) == (["a", "b"], "full")


def test_a_batch_leaves_before_a_deadline_would_be_missed() -> None:
    former = fixed(timeout_s=1.0)
    former.add(queued("patient", 64, at=0.0))
    former.add(queued("urgent", 64, at=0.0, deadline=0.1))
    assert form(former, 0.0) is None
    assert former.wake_at() == pytest.approx(0.1 - 0.0056)  # both together are 128 tokens
    formed = form(former, 0.0945)
    assert formed is not None
    assert (ids(formed), formed.reason, formed.num_past_deadline) == (["urgent", "patient"], "deadline", 0)


def test_a_request_past_its_deadline_is_served_and_counted() -> None:
    former = fixed(timeout_s=1.0)
    former.add(queued("late", at=0.0, deadline=0.01))
    formed = form(former, 5.0)
    assert formed is not None
    assert (ids(formed), formed.num_past_deadline) == (["late"], 1)


def test_a_hold_does_not_outlive_what_it_waited_for() -> None:
    former = fixed(max_requests=2)
    former.add(queued("a", at=0.0))
    former.add(queued("b", at=0.0))
    assert former.remove("a")
    assert form(former, 0.01) is None  # it is not full any more
    formed = form(former, 0.02)
    assert formed is not None
    assert (ids(formed), formed.reason) == (["b"], "timeout")


# In which order.


def test_order_is_class_then_earliest_deadline_then_oldest() -> None:
    former = fixed(max_requests=1, size_patience=0.0)
    former.add(queued("old", at=0.0))
    former.add(queued("low", at=0.0, priority=1, deadline=0.001))
    former.add(queued("young", at=0.1))
    former.add(queued("soon", at=0.2, deadline=0.9))
    former.add(queued("high", at=0.3, priority=-1))
    served = [ids(form(former, 0.3))[0] for _ in range(5)]
    assert served == ["high", "soon", "old", "young", "low"]


def test_those_that_come_back_go_first_oldest_first() -> None:
    former = fixed(max_requests=1)
    former.add(queued("urgent", at=0.0, priority=-5))
    former.add(queued("second", at=0.2), front=True)
    former.add(queued("first", at=0.1, priority=9), front=True)
    assert [ids(form(former, 1.0))[0] for _ in range(3)] == ["first", "second", "urgent"]


def test_a_long_prompt_lets_short_ones_pass_that_came_soon_after_it_but_no_later_ones() -> None:
    former = fixed(max_requests=1, size_patience=4.0)
    former.add(queued("long", 4000, at=0.0))  # about 97 ms, so up to 0.4 s
    former.add(queued("short", 16, at=0.1))
    former.add(queued("later", 16, at=0.5))
    assert [ids(form(former, 1.0))[0] for _ in range(3)] == ["short", "long", "later"]


def test_two_requests_of_one_id_cannot_wait() -> None:
    former = fixed()
    former.add(queued("a"))
    with pytest.raises(ValueError, match="request_id a"):
        former.add(queued("a"))


@pytest.mark.parametrize(
    ("option", "value"),
    [("max_requests", 0), ("timeout_s", -1.0), ("timeout_s", float("nan")), ("max_tokens", 0)],
)
def test_a_setting_out_of_range_is_named(option: str, value: float) -> None:
    options: dict[str, object] = {"max_requests": 8, "timeout_s": 0.02, option: value}
    for policy in (FixedPolicy, AdaptivePolicy):
        with pytest.raises(ValueError, match=option):
            policy(cost_model=h200_model(), **options)  # type: ignore[arg-type]


# Pages.


def test_requests_wait_for_pages_in_order_and_go_the_moment_pages_come_free() -> None:
    former = fixed(max_requests=2, timeout_s=0.0)
    former.add(queued("a", pages=5))
    former.add(queued("b", pages=5))
    assert form(former, 0.0, pages=4) is None
    assert former.wake_at() is None  # no timer helps
    assert form(former, 0.0, sequences=0) is None
    assert ids(form(former, 0.0, pages=5)) == ["a"]
    assert ids(form(former, 0.0, pages=5)) == ["b"]


def test_small_requests_overtake_one_that_lacks_pages_only_for_a_bounded_time() -> None:
    former = fixed(max_requests=1, timeout_s=0.0, max_skip_s=0.5, size_patience=0.0)
    former.add(queued("big", pages=10, at=0.0))
    for i in range(20):
        former.add(queued(f"small{i}", pages=1, at=0.0))
    overtook = 0
    for tick in range(10):
        overtook += len(ids(form(former, tick * 0.1, pages=3)))
    assert overtook == 5  # at 0.0 s, and until 0.5 s after that
    assert form(former, 1.0, pages=9) is None  # now pages gather for it
    assert ids(form(former, 1.0, pages=10)) == ["big"]


# Fairness.


@settings(deadline=None)
@given(
    flood=st.lists(st.integers(1, 1500), min_size=50, max_size=80),
    served_before=st.integers(0, 20),
    mine=st.lists(st.integers(1, 500), min_size=1, max_size=4),
    max_requests=st.integers(1, 8),
)
def test_a_tenant_that_floods_the_queue_delays_another_by_no_more_than_its_share(
    flood: list[int], served_before: int, mine: list[int], max_requests: int
) -> None:
    quantum = 256
    former = fixed(max_requests=max_requests, timeout_s=0.0, quantum_tokens=quantum, max_skip_s=0.0)
    for i, num_tokens in enumerate(flood):
        former.add(queued(f"flood{i}", num_tokens, at=0.0, tenant="flood"))
    for _ in range(served_before):
        form(former, 0.0)
    for i, num_tokens in enumerate(mine):
        former.add(queued(f"mine{i}", num_tokens, at=1.0, tenant="me"))
    of_others = of_mine = 0
    left = {f"mine{i}" for i in range(len(mine))}
    while left:
        formed = form(former, 1.0)
        assert formed is not None
        for request in formed.requests:
            if request.tenant == "me":
                # A round is a quantum each, and the last request of a round may exceed it.
                most = of_mine + 2 * quantum + 2 * max(flood)
                assert of_others <= most + max_requests * max(flood)
                of_mine += request.num_tokens
                left.discard(request.request_id)
            else:
                of_others += request.num_tokens


def test_tenants_share_by_tokens_not_by_requests() -> None:
    former = fixed(max_requests=4, timeout_s=0.0, quantum_tokens=256)
    for i in range(400):
        former.add(queued(f"a{i}", 16, at=0.0, tenant="small"))
        former.add(queued(f"b{i}", 128, at=0.0, tenant="large"))
        former.add(queued(f"c{i}", 64, at=0.0, tenant="middle"))
    tokens = {"small": 0, "large": 0, "middle": 0}
    for _ in range(100):
        formed = form(former, 0.0)
        assert formed is not None
        for request in formed.requests:
            tokens[request.tenant] += request.num_tokens
    assert max(tokens.values()) - min(tokens.values()) <= 2 * 256


def test_an_idle_tenant_saves_nothing_up() -> None:
    former = fixed(max_requests=1, timeout_s=0.0, quantum_tokens=64)
    former.add(queued("early", tenant="idler"))
    assert ids(form(former, 0.0)) == ["early"]
    for i in range(100):
        former.add(queued(f"a{i}", at=0.0, tenant="worker"))
    for _ in range(50):
        form(former, 0.0)
    for i in range(20):
        former.add(queued(f"i{i}", at=0.0, tenant="idler"))
    tenants = [formed.requests[0].tenant for _ in range(20) if (formed := form(former, 0.0))]
    assert 9 <= tenants.count("idler") <= 11


def test_many_tenants_that_come_once_are_forgotten_but_not_what_they_owe() -> None:
    former = fixed(max_requests=1, timeout_s=0.0, quantum_tokens=64)
    for i in range(5):
        former.add(queued(f"steady{i}", tenant="steady"))
    for i in range(2000):
        former.add(queued(f"r{i}", tenant=f"t{i}"))
        former.add(queued(f"big{i}", 640, tenant="greedy"))
        served = ids(form(former, 0.0))
        assert served
    assert len(former) == 5 + 2 * 2000 - 2000


# Buckets.


def test_a_full_batch_prefers_requests_that_fill_its_bucket() -> None:
    former = fixed(max_requests=4, timeout_s=0.0)
    for name, num_tokens in (("a", 64), ("b", 64), ("c", 64), ("d", 70), ("e", 64)):
        former.add(queued(name, num_tokens, at=0.0))
    assert ids(form(former, 0.0)) == ["a", "b", "c", "e"]  # 256 of 256, not 262 of 384
    assert ids(form(former, 0.0)) == ["d"]


def test_a_batch_that_leaves_nothing_behind_takes_all_whatever_its_bucket() -> None:
    former = fixed(max_requests=8, timeout_s=0.0)
    for i in range(5):
        former.add(queued(f"r{i}", 65))
    assert len(ids(form(former, 0.0))) == 5


def test_the_adaptive_policy_leaves_some_behind_if_that_saves_more_than_it_costs() -> None:
    cost = h200_model()
    former = BatchFormer(AdaptivePolicy(max_requests=16, timeout_s=0.02, cost_model=cost), cost)
    for i in range(64):
        former.add(queued(f"r{i}", 33))
    formed = form(former, 0.0)
    assert formed is not None
    assert len(formed.requests) == 15  # 495 of 512 tokens; 16 would be 528 of 768
    assert formed.reason == "full"


def test_what_is_learned_of_the_workers_changes_where_a_batch_is_saturated() -> None:
    cost = h200_model()
    former = BatchFormer(AdaptivePolicy(max_requests=64, timeout_s=0.02, cost_model=cost), cost)
    former.measured({64: 0.010, 128: 0.020, 256: 0.040})  # one more token costs as much as it brings
    former.add(queued("a", 64))
    former.add(queued("b", 64))
    formed = form(former, 0.0)
    assert formed is not None
    assert (ids(formed), formed.reason) == (["a"], "saturated")
    for _ in range(300):
        former.observe(64, 0.039)
    assert former.expected_seconds(64) == pytest.approx(0.039, rel=0.01)
    for i in range(6):
        former.add(queued(f"c{i}", 64))
    assert len(ids(form(former, 0.0))) == 4  # now 64 tokens cost as much as 256
