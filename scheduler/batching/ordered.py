"""An ordered queue whose first few items can be looked at, in order, without taking them out."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush, heapreplace
from typing import Generic, Protocol, TypeVar

_MAX_HEAD = 128
"""A head that grew longer than this, by insertions, gives half of itself back."""
_MAX_RUNS = 1024


class Listed(Protocol):
    """What can stand in an `OrderedQueue`."""

    live: bool
    """False once it was discarded. Owned by the queue."""


T = TypeVar("T", bound=Listed)
_Key = tuple[int, float, int, int, T]
"""Rank, due, seq; a number that is unique, so that items are never compared; the item."""


class OrderedQueue(Generic[T]):
    """Items in order of (rank, due, seq).

    Three parts. `head` is a short sorted list of the first items, along which readers walk; everything in it
    is before everything in the other two. `runs` are a few sorted runs, as in patience sorting: a new item
    is appended to the run whose last item is closest before it. Items that come in order need one run, those
    that are due a fixed time after they came, with one of a few such times, one run each. What fits no run
    goes into `heap`. So adding and pulling costs O(log of the number of runs) at best and O(log n) at worst,
    and looking at the first k items O(k) once they were pulled into `head`.

    Discarding only marks an item; it goes when a reader meets it, or when the dead outnumber the living.
    """

    __slots__ = ("_fronts", "_head", "_heap", "_num_added", "_num_dead", "_num_live", "_runs", "_tails")

    def __init__(self) -> None:
        self._head: list[_Key[T]] = []
        self._runs: list[deque[_Key[T]]] = []
        self._tails: list[_Key[T]] = []
        """The last key of each run, ascending."""
        self._fronts: list[tuple[_Key[T], deque[_Key[T]]]] = []
        """A heap of the runs by their first key."""
        self._heap: list[_Key[T]] = []
        self._num_added = 0
        self._num_live = 0
        self._num_dead = 0

    def __len__(self) -> int:
        return self._num_live

    def add(self, rank: int, due: float, seq: int, item: T) -> None:
        """Put an item in its place."""
        self._num_added += 1
        self._num_live += 1
        key = (rank, due, seq, self._num_added, item)
        head = self._head
        if not head or key > head[-1]:
            self._put_behind(key)
            return
        insort(head, key)
        if len(head) > _MAX_HEAD:
            for moved in head[_MAX_HEAD // 2 :]:
                self._put_behind(moved)
            del head[_MAX_HEAD // 2 :]

    def discard(self, *items: T) -> None:
        """Take out items that are in the queue."""
        for item in items:
            item.live = False
        self._num_live -= len(items)
        self._num_dead += len(items)
        if self._num_dead > self._num_live + _MAX_HEAD:
            self._sweep()

    def first(self) -> T | None:
        """Return the first item, or None."""
        for key in self._head:
            if key[4].live:
                return key[4]
        pulled = self._pull()
        if pulled is None:
            return None
        self._head.append(pulled)
        return pulled[4]

    def __iter__(self) -> Iterator[T]:
        """Walk along the items in order. The queue must not change meanwhile."""
        head = self._head
        if self._num_dead and head:
            num_keys = len(head)
            head[:] = [key for key in head if key[4].live]
            self._num_dead -= num_keys - len(head)
        for key in head:
            yield key[4]
        while (pulled := self._pull()) is not None:
            head.append(pulled)
            yield pulled[4]

    def _put_behind(self, key: _Key[T]) -> None:
        """Put a key into the runs or the heap."""
        i = bisect_left(self._tails, key) - 1
        if i >= 0:
            self._runs[i].append(key)
            self._tails[i] = key
        elif len(self._runs) < _MAX_RUNS:
            run = deque((key,))
            self._runs.insert(0, run)
            self._tails.insert(0, key)
            heappush(self._fronts, (key, run))
        else:
            heappush(self._heap, key)

    def _pull(self) -> _Key[T] | None:
        """Take the first living key out of the runs and the heap."""
        fronts, heap = self._fronts, self._heap
        while fronts or heap:
            if heap and not (fronts and fronts[0][0] < heap[0]):
                key = heappop(heap)
            else:
                key, run = fronts[0]
                run.popleft()
                if run:
                    heapreplace(fronts, (run[0], run))
                else:
                    heappop(fronts)
                    i = bisect_left(self._tails, key)
                    del self._runs[i], self._tails[i]
            if key[4].live:
                return key
            self._num_dead -= 1
        return None

    def _sweep(self) -> None:
        """Forget the dead."""
        living = [key for run in self._runs for key in run if key[4].live]
        living += [key for key in self._heap if key[4].live]
        living.sort()
        run = deque(living)
        self._head = [key for key in self._head if key[4].live]
        self._runs, self._tails, self._fronts, self._heap = [], [], [], []
        if living:
            self._runs, self._tails, self._fronts = [run], [living[-1]], [(living[0], run)]
        self._num_dead = 0
