"""Batches of requests of which a part is cached: what counts, who waits for whom, and for how long."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.batching.cost_model import CostModel
from scheduler.batching.former import BatchFormer, QueuedRequest
from scheduler.batching.policies import FixedPolicy
from scheduler.batching.requests import Work

COST = CostModel.proportional([16, 64, 256])


@dataclass
class View:
    """A cache as the test has it: what each request takes; those that are not named wait."""

    works: dict[str, Work]
    num_followers: int = 0
    looked_at: list[str] = field(default_factory=list)

    def look(self, request_id: str) -> Work | None:
        self.looked_at.append(request_id)
        return self.works.get(request_id)


def make_former(*names: str, max_tokens: int | None = None) -> BatchFormer:
    """Return a former with requests of 100 tokens and 4 pages each."""
    policy = FixedPolicy(max_requests=4, timeout_s=1.0, max_tokens=max_tokens, cost_model=COST)
    former = BatchFormer(policy, COST)
    for i, name in enumerate(names):
        former.add(
            QueuedRequest(
                request_id=name, num_tokens=100, num_pages=4, arrival_time=i / 1000, may_be_cached=True
            )
        )
    return former


def form(former: BatchFormer, view: View, *, now: float = 0.1, free_pages: int = 100) -> list[str] | None:
    formed = former.form(now, free_pages=free_pages, free_sequences=8, cache=view)
    return None if formed is None else [request.request_id for request in formed.requests]


def test_requests_count_with_the_tokens_that_they_have_to_compute() -> None:
    former = make_former("a", "b", "c", max_tokens=64)
    view = View({name: Work(num_tokens=30, num_used_pages=0) for name in "abc"})
    formed = former.form(0.1, free_pages=100, free_sequences=8, cache=view)
    assert formed is not None
    assert [request.request_id for request in formed.requests] == ["a", "b"]
    assert formed.num_tokens == 60
    assert former.num_tokens == former.tokens_by_class[0] == 30, "the one that waits was looked at too"


def test_pages_that_others_hold_need_not_be_free() -> None:
    former = make_former("a", "b")
    view = View({"a": Work(num_tokens=40, num_used_pages=2), "b": Work(num_tokens=40, num_used_pages=3)})
    assert form(former, view, now=2.0, free_pages=2) == ["a"]
    assert form(former, view, now=2.0, free_pages=0) is None
    assert form(former, view, now=2.0, free_pages=1) == ["b"]


def test_one_that_should_wait_is_passed_over_and_leaves_when_it_need_not() -> None:
    former = make_former("a", "b")
    work = Work(num_tokens=100, num_used_pages=0)
    assert form(former, View({"b": work}), now=2.0) == ["b"]
    assert form(former, View({}), now=2.0) is None
    assert former.wake_at() is None, "it waits for a prefill, not for a time"
    assert form(former, View({"a": work}), now=2.0) == ["a"]
    assert len(former) == former.num_tokens == 0


def test_a_batch_on_which_others_wait_is_not_held() -> None:
    work = Work(num_tokens=100, num_used_pages=0)
    assert form(make_former("a", "b"), View({"a": work})) is None
    assert form(make_former("a", "b"), View({"a": work}, num_followers=1)) == ["a"]


def test_however_many_wait_for_cached_blocks_a_batch_looks_at_few() -> None:
    former = make_former(*(f"r{i}" for i in range(1000)))
    view = View({})
    assert form(former, view) is None
    assert len(view.looked_at) < 100
