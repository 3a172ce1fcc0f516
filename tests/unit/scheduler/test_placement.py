import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.placement import DecodePlacement, PrefillPlacement


def test_a_batch_goes_to_the_idle_worker_that_was_fastest() -> None:
    placement = PrefillPlacement()
    for name in ("slow", "fast"):
        placement.add(name)
    for name, seconds in (("slow", 0.02), ("fast", 0.01)):
        for _ in range(30):
            placement.dispatched(name, 0.01, 0.0)
            placement.finished(name, 0.01, seconds, 0.0)
    assert placement.num_idle == 2
    assert placement.choose(0.01, 1.0) == "fast"
    placement.dispatched("fast", 0.01, 1.0)
    assert placement.choose(0.01, 1.0) == "slow"
    placement.dispatched("slow", 0.01, 1.0)
    assert placement.choose(0.01, 1.0) is None
    assert placement.num_idle == 0
    assert placement.workers(1.0).next_idle_at == pytest.approx(1.01, abs=1e-4)


def test_a_fast_worker_that_is_nearly_done_beats_an_idle_slow_one() -> None:
    placement = PrefillPlacement(max_batches=2)
    for name in ("slow", "fast"):
        placement.add(name)
        for _ in range(60):
            placement.dispatched(name, 0.1, 0.0)
            placement.finished(name, 0.1, 0.4 if name == "slow" else 0.1, 0.0)
    placement.dispatched("fast", 0.1, 10.0)
    assert placement.choose(0.1, 10.09) == "fast"  # 0.01 + 0.1 s against 0.4 s
    assert placement.choose(0.01, 10.0) == "slow"  # 0.1 + 0.01 s against 0.04 s


def test_one_hiccup_does_not_condemn_a_worker() -> None:
    placement = PrefillPlacement()
    placement.add("a")
    placement.dispatched("a", 0.01, 0.0)
    placement.finished("a", 0.01, 10.0, 10.0)
    placement.dispatched("a", 0.01, 10.0)
    assert placement.workers(10.0).next_idle_at == pytest.approx(10.013)


def test_a_worker_that_died_is_not_chosen() -> None:
    placement = PrefillPlacement()
    placement.add("a")
    placement.add("b")
    placement.dispatched("a", 0.01, 0.0)
    placement.remove("a")
    assert placement.workers(0.0).next_idle_at is None
    assert placement.choose(0.01, 0.0) == "b"
    placement.remove("b")
    assert placement.choose(0.01, 0.0) is None
    placement.add("a")
    assert placement.choose(0.01, 0.0) == "a"


# Start a batch of so many hundredths of a second on the chosen worker; end one; add or remove a worker.
STEPS = st.lists(
    st.tuples(st.sampled_from(["start", "start", "end", "add", "remove"]), st.integers(1, 60)), max_size=120
)


@settings(deadline=None)
@given(STEPS, st.integers(1, 3))
def test_the_choice_equals_a_search_of_all_workers(steps: list[tuple[str, int]], max_batches: int) -> None:
    placement = PrefillPlacement(max_batches=max_batches)
    in_flight: dict[str, list[float]] = {}
    busy_until: dict[str, float] = {}
    now = 0.0
    for name, number in steps:
        now += 0.01
        worker = f"w{number % 6}"
        if name == "add" and worker not in in_flight:
            placement.add(worker)
            in_flight[worker], busy_until[worker] = [], 0.0
        elif name == "remove" and worker in in_flight:
            placement.remove(worker)
            del in_flight[worker], busy_until[worker]
        elif name == "start":
            expected = number / 100
            chosen = placement.choose(expected, now)
            ends = {
                w: max(now, busy_until[w]) + expected for w, b in in_flight.items() if len(b) < max_batches
            }
            if chosen is None:
                assert not ends
                continue
            assert ends[chosen] == pytest.approx(min(ends.values()))
            placement.dispatched(chosen, expected, now)
            in_flight[chosen].append(expected)
            busy_until[chosen] = ends[chosen]
        elif name == "end":
            for worker, batches in in_flight.items():
                if batches:
                    expected = batches.pop(0)
                    placement.finished(worker, expected, expected, now)  # as expected, so none is slower
                    if not batches:
                        busy_until[worker] = now
                    break
        assert placement.num_idle == sum(not batches for batches in in_flight.values())
        ends_of_busy = [busy_until[w] for w, batches in in_flight.items() if batches]
        expected_idle = max(now, min(ends_of_busy)) if ends_of_busy else None
        assert placement.workers(now).next_idle_at == pytest.approx(expected_idle)


def test_decode_goes_to_the_worker_with_the_most_free_pages_that_can_take_a_sequence() -> None:
    placement = DecodePlacement()
    assert placement.choose() is None
    placement.update("small", free_pages=10, free_sequences=64)
    placement.update("large", free_pages=90, free_sequences=5)
    placement.update("no more", free_pages=100, free_sequences=0)
    assert placement.choose() == "large"
    placement.update("large", free_pages=10, free_sequences=4)
    assert placement.choose() == "small"
    placement.remove("small")
    assert placement.choose() == "large"
    placement.remove("large")
    assert placement.choose() == "no more"


def test_decode_workers_that_are_equal_take_turns() -> None:
    placement = DecodePlacement()
    free = dict.fromkeys(("a", "b", "c"), 100)
    for name in free:
        placement.update(name, free_pages=100, free_sequences=64)
    for _ in range(30):
        name = placement.choose()
        assert name is not None
        free[name] -= 3
        placement.update(name, free_pages=free[name], free_sequences=64)
    assert set(free.values()) == {70}
