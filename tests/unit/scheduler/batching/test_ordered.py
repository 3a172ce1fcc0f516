from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.batching.ordered import OrderedQueue


class Item:
    def __init__(self, key: tuple[int, float, int]) -> None:
        self.key = key
        self.live = True


# Add an item that is due then; discard the i-th of those that wait; look at the first k; take the first k.
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 40)),
        st.tuples(st.just("discard"), st.integers(0, 1000)),
        st.tuples(st.just("look"), st.integers(0, 30)),
        st.tuples(st.just("take"), st.integers(0, 30)),
    ),
    max_size=150,
)


@settings(deadline=None)
@given(OPERATIONS, st.integers(1, 300))
def test_the_queue_equals_a_sorted_list(operations: list[tuple[str, int]], repeat: int) -> None:
    queue: OrderedQueue[Item] = OrderedQueue()
    model: list[Item] = []
    seq = 0
    for name, number in operations:
        if name == "add":
            # Sometimes many at once, so that the head gives some back and the dead are swept out.
            for i in range(repeat if number % 10 == 0 else 1):
                seq += 1
                item = Item((number % 2, float((number * 7 + i * 13) % 41), seq))
                queue.add(*item.key, item)
                model.append(item)
            model.sort(key=lambda item: item.key)
        elif name == "discard" and model:
            item = model.pop(number % len(model))
            queue.discard(item)
            assert not item.live
        elif name in ("look", "take"):
            first = [item for item, _ in zip(queue, range(number), strict=False)]
            assert [item.key for item in first] == [item.key for item in model[:number]]
            if name == "take":
                for item in first:
                    queue.discard(item)
                del model[:number]
        assert len(queue) == len(model)
    assert [item.key for item in queue] == [item.key for item in model]
    assert queue.first() is (model[0] if model else None)


def test_items_that_come_in_descending_order_come_out_ascending() -> None:
    queue: OrderedQueue[Item] = OrderedQueue()
    for due in range(5000, 0, -1):
        queue.add(0, due, due, Item((0, due, due)))
    assert [item.key[1] for item in queue] == list(range(1, 5001))
