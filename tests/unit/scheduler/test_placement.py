import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.batching.policies import Workers
from scheduler.placement import DecodePlacement, PrefillPlacement, Room


def test_a_batch_goes_to_the_idle_worker_that_was_fastest() -> None:
    placement = PrefillPlacement()
    for name in ("slow", "fast"):
        placement.add(name)
    for name, seconds in (("slow", 0.02), ("fast", 0.01)):
        for _ in range(30):
            placement.dispatched(name, 0.01, 0.0)
            placement.finished(name, 0.01, seconds, 0.0)
    assert placement.num_idle == 2
    assert placement.choose() == "fast"
    placement.dispatched("fast", 0.01, 1.0)
    assert placement.choose() == "slow"
    placement.dispatched("slow", 0.01, 1.0)
    assert placement.choose() is None
    assert placement.num_idle == 0
    assert placement.workers(1.0).next_idle_at == pytest.approx(1.01, abs=1e-4)


def test_a_batch_is_sent_ahead_to_the_worker_that_is_idle_first_and_not_long_before_that() -> None:
    placement = PrefillPlacement(max_batches=2, lead_s=0.002, full_lead_s=0.05)
    for name, seconds in (("late", 0.3), ("early", 0.2)):
        placement.add(name)
        placement.dispatched(name, seconds, 10.0)
    at = [10.0, 10.149, 10.151, 10.197, 10.199, 10.2, 10.201, 10.203, 10.5]
    rooms = [placement.room(now) for now in at]
    assert [room and room.only_full for room in rooms] == [
        *(None, None),
        *(True, True),
        *(False, False, False),
        # It should have been done by now, and nobody knows when it will be.
        *(True, True),
    ]
    assert placement.choose() == "early"
    assert rooms[2] is not None
    assert not rooms[2].is_idle
    assert rooms[2].workers == Workers(num_idle=1, num_busy=1, next_idle_at=10.3)
    assert placement.next_room_at(10.0) == pytest.approx(10.15)
    assert placement.next_room_at(10.16) == pytest.approx(10.198)
    assert placement.next_room_at(10.198) is None
    placement.dispatched("early", 0.2, 10.199)
    assert placement.choose() == "late"
    assert placement.next_room_at(10.199) == pytest.approx(10.25)
    # A batch that ends early brings forward the one behind it.
    placement.finished("early", 0.2, 0.2, 10.1995)
    assert placement.next_room_at(10.1995) == pytest.approx(10.25)
    placement.finished("late", 0.3, 0.3, 10.2)
    assert placement.room(10.2) == Room(placement.workers(10.2), is_idle=True, only_full=False)
    assert placement.choose() == "late"


@given(st.floats(0, 1e6), st.floats(1e-4, 10))
def test_there_is_room_at_the_very_moment_that_was_named(now: float, seconds: float) -> None:
    placement = PrefillPlacement(max_batches=2)
    placement.add("a")
    placement.dispatched("a", seconds, now)
    while (at := placement.next_room_at(now)) is not None:
        before, now = placement.room(now), at
        assert placement.room(now) != before
    room = placement.room(now)
    assert room is not None
    assert not room.only_full


def test_nothing_is_sent_behind_a_batch_that_has_its_worker_for_itself() -> None:
    placement = PrefillPlacement(max_batches=2)
    placement.add("a")
    placement.dispatched("a", 0.01, 0.0, is_alone=True)
    assert placement.room(0.01) is None
    assert placement.next_room_at(0.0) is None
    placement.finished("a", 0.01, 0.01, 0.01)
    placement.dispatched("a", 0.01, 0.01)
    assert placement.room(0.02) is not None


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
    assert placement.choose() == "b"
    placement.remove("b")
    assert placement.choose() is None
    placement.add("a")
    assert placement.choose() == "a"


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
            chosen = placement.choose()
            ends = {
                w: max(now, busy_until[w]) if b else 0.0 for w, b in in_flight.items() if len(b) < max_batches
            }
            if chosen is None:
                assert not ends
                continue
            assert ends[chosen] == pytest.approx(min(ends.values()))
            placement.dispatched(chosen, expected, now)
            in_flight[chosen].append(expected)
            busy_until[chosen] = max(now, busy_until[chosen]) + expected
        elif name == "end":
            for worker, batches in in_flight.items():
                if batches:
                    expected = batches.pop(0)
                    placement.finished(worker, expected, expected, now)  # as expected, so none is slower
                    busy_until[worker] = now + sum(batches)
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
