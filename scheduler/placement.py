"""Which worker gets the next batch: of the prefill workers the first to be idle, of the decode workers the
emptiest.

Both choices cost O(log n) in the number of workers, so that a fleet of a thousand is no slower than one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Generic, NamedTuple, TypeVar

from scheduler.batching.policies import Workers

_NEWEST_WEIGHT = 0.1
"""Weight of the newest batch in the moving average of a worker's slowness."""
_MAX_RATIO = 4.0
"""A batch counts as at most this many times slower, or faster, than expected: hiccups happen."""

K = TypeVar("K", float, tuple[bool, int, int])


class _Ranking(Generic[K]):
    """Names by a key that changes; the least is found at once. Old places are dropped when they come up."""

    def __init__(self) -> None:
        self._keys: dict[str, tuple[K, int]] = {}
        self._heap: list[tuple[K, int, str]] = []
        self._num_changes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def put(self, name: str, key: K) -> None:
        """Give a name its place. Of equals, the one that was put first is less."""
        self._num_changes += 1
        self._keys[name] = (key, self._num_changes)
        heappush(self._heap, (key, self._num_changes, name))
        if len(self._heap) > 2 * len(self._keys) + 16:
            self._heap = [(key, change, name) for name, (key, change) in self._keys.items()]
            heapify(self._heap)

    def remove(self, name: str) -> None:
        """Forget a name; nothing happens if it is not there."""
        self._keys.pop(name, None)

    def least(self) -> tuple[str, K] | None:
        """Return the name of the least key, and the key."""
        while self._heap:
            key, change, name = self._heap[0]
            if self._keys.get(name) == (key, change):
                return name, key
            heappop(self._heap)
        return None


@dataclass(slots=True, kw_only=True)
class _PrefillWorker:
    slowness: float = 1.0
    """What its batches take, as a multiple of what the cost model expects."""
    busy_until: float = 0.0
    """When it is expected to have finished what it was given."""
    in_flight: list[float] = field(default_factory=list)
    """What each of its batches takes by the cost model, the oldest first."""
    is_closed: bool = False
    """It gets no further batch before it is idle."""


class Room(NamedTuple):
    """Where a batch could go now."""

    workers: Workers
    """The workers as a policy is to see them: the one that would take the batch counts as idle."""
    is_idle: bool
    """It is."""
    only_full: bool
    """It has something to do for so long that only a batch that cannot become better should be sent ahead."""


class PrefillPlacement:
    """Owns what each prefill worker has in flight, and how fast it was of late.

    A batch goes to an idle worker, the fastest of them. If none is idle, it can be sent ahead to a busy one that may
    be given a further batch, the one that is idle first: `lead_s` before that, which is what a message takes, or
    `full_lead_s` before that, if the batch is full. What is sent ahead cannot be taken back, so earlier than that
    nothing is: others might come that should join it, or go before it.
    """

    def __init__(self, *, max_batches: int = 1, lead_s: float = 0.001, full_lead_s: float = 0.01) -> None:
        """`max_batches` is how many batches a worker may have in flight."""
        if max_batches < 1:
            raise ValueError(f"max_batches must be >= 1, got {max_batches}")
        self._max_batches = max_batches
        self._lead_s = lead_s
        self._full_lead_s = full_lead_s
        self._workers: dict[str, _PrefillWorker] = {}
        self._idle: _Ranking[float] = _Ranking()
        self._busy: _Ranking[float] = _Ranking()
        self._full: _Ranking[float] = _Ranking()

    @property
    def num_idle(self) -> int:
        """Workers that have nothing in flight."""
        return len(self._idle)

    def add(self, name: str) -> None:
        """A worker is ready, and idle."""
        self._workers[name] = _PrefillWorker()
        self._place(name)

    def remove(self, name: str) -> None:
        """A worker is gone, with all it had in flight."""
        del self._workers[name]
        for ranking in (self._idle, self._busy, self._full):
            ranking.remove(name)

    def choose(self) -> str | None:
        """Return the worker for the next batch; None if all are full."""
        least = self._idle.least() or self._busy.least()
        return None if least is None else least[0]

    def room(self, now: float) -> Room | None:
        """Return what `choose` would be for; None if no batch should be sent now."""
        if self.num_idle:
            return Room(self.workers(now), is_idle=True, only_full=False)
        least = self._busy.least()
        if least is None or least[1] - self._full_lead_s > now:
            return None
        name, idle_at = least
        self._busy.remove(name)
        others = self.workers(now)
        self._busy.put(name, idle_at)
        return Room(
            others._replace(num_idle=1),
            is_idle=False,
            # One that is late by more than that takes nobody knows how long.
            only_full=not idle_at - self._lead_s <= now <= idle_at + self._lead_s,
        )

    def next_room_at(self, now: float) -> float | None:
        """Return when `room` will be another one if nothing happens before; None if it will not."""
        least = None if self.num_idle else self._busy.least()
        if least is None:
            return None
        changes = (least[1] - self._full_lead_s, least[1] - self._lead_s)
        return next((at for at in changes if at > now), None)

    def workers(self, now: float) -> Workers:
        """Return how many are idle and busy, and when the next is expected to be idle, not before `now`."""
        ends = [least[1] for ranking in (self._busy, self._full) if (least := ranking.least()) is not None]
        return Workers(
            num_idle=len(self._idle),
            num_busy=len(self._busy) + len(self._full),
            next_idle_at=max(now, min(ends)) if ends else None,
        )

    def dispatched(self, name: str, expected_s: float, now: float, *, is_alone: bool = False) -> None:
        """A worker was given a batch that takes `expected_s` by the cost model. `is_alone`: none follows it ahead."""
        worker = self._workers[name]
        worker.busy_until = max(now, worker.busy_until) + worker.slowness * expected_s
        worker.in_flight.append(expected_s)
        worker.is_closed |= is_alone
        self._place(name)

    def finished(self, name: str, expected_s: float, seconds: float, now: float) -> None:
        """A worker finished one of its batches, in `seconds`."""
        worker = self._workers[name]
        worker.in_flight.remove(expected_s)
        if expected_s > 0 and seconds > 0:
            ratio = seconds / expected_s / worker.slowness
            ratio = min(max(ratio, 1 / _MAX_RATIO), _MAX_RATIO)
            worker.slowness *= 1 + _NEWEST_WEIGHT * (ratio - 1)
        worker.busy_until = now + worker.slowness * sum(worker.in_flight)
        worker.is_closed &= bool(worker.in_flight)
        self._place(name)

    def _place(self, name: str) -> None:
        worker = self._workers[name]
        for ranking in (self._idle, self._busy, self._full):
            ranking.remove(name)
        if not worker.in_flight:
            self._idle.put(name, worker.slowness)
        elif len(worker.in_flight) < self._max_batches and not worker.is_closed:
            self._busy.put(name, worker.busy_until)
        else:
            self._full.put(name, worker.busy_until)


class DecodePlacement:
    """Owns what each decode worker has free. A batch goes to the one with the most free pages.

    So what fits anywhere fits there. Of equals it is the one with the most free sequences; one that can take no
    further sequence comes last.
    """

    def __init__(self) -> None:
        self._ranking: _Ranking[tuple[bool, int, int]] = _Ranking()

    def update(self, name: str, *, free_pages: int, free_sequences: int) -> None:
        """Take in what a worker has free."""
        self._ranking.put(name, (free_sequences < 1, -free_pages, -free_sequences))

    def remove(self, name: str) -> None:
        """A worker is gone."""
        self._ranking.remove(name)

    def choose(self) -> str | None:
        """Return the worker for the next batch, or None if there is none."""
        least = self._ranking.least()
        return None if least is None else least[0]
