"""The prefill workers as the scheduler's core sees them: what each one has in flight, and who leaves. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler.messages import PrefillBatch, PrefillResult
from scheduler.placement import PrefillPlacement, Room


class ComputedBatch(NamedTuple):
    """A batch whose pages are on their way to their decode worker."""

    batch: PrefillBatch
    result: PrefillResult


_MAX_BATCHES = 2
"""One that is computed, and one that is ready to be as soon as it ends."""


class _Dispatched(NamedTuple):
    batch: PrefillBatch
    expected_s: float
    """What it takes by the cost model."""


@dataclass(slots=True, kw_only=True)
class _Worker:
    in_flight: dict[int, _Dispatched] = field(default_factory=dict)
    """By the batch's id, the oldest first."""
    sending: dict[int, ComputedBatch] = field(default_factory=dict)
    is_draining: bool = False


class PrefillWorkers:
    """Owns the batches that each prefill worker has to compute, at most two, and those whose pages it still sends."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._away: set[str] = set()
        self._draining: dict[str, _Worker] = {}
        self._placement = PrefillPlacement(max_batches=_MAX_BATCHES)
        self._recomputing: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._workers

    @property
    def num_idle(self) -> int:
        """Workers that have nothing to compute and may be given a batch."""
        return self._placement.num_idle

    @property
    def compute_from_cache(self) -> bool:
        """Whether none of them computes what is cached, as far as they have shown."""
        return not self._recomputing

    def recomputes(self, name: str) -> None:
        """Take note of a worker that does not see cached pages: it sends what it computes there."""
        self._recomputing.add(name)

    @property
    def num_open(self) -> int:
        """Workers that take batches, now or later: also those that are expected back."""
        return len(self._workers) - len(self._draining) + len(self._away)

    @property
    def busy(self) -> list[str]:
        """Workers that have a batch to compute, or pages to send."""
        return [name for name, worker in self._workers.items() if worker.in_flight or worker.sending]

    @property
    def draining(self) -> dict[str, bool]:
        """Whether each worker drains, by name."""
        return {name: worker.is_draining for name, worker in self._workers.items()}

    def room(self, now: float) -> Room | None:
        """Return where a batch could go now, None if none should be sent."""
        return self._placement.room(now)

    def next_room_at(self, now: float) -> float | None:
        """Return when `room` will be another one if nothing happens before; None if it will not."""
        return self._placement.next_room_at(now)

    def add(self, name: str) -> None:
        """A worker is ready, and idle."""
        self._away.discard(name)
        self._workers[name] = _Worker()
        self._draining.pop(name, None)
        self._placement.add(name)

    def expect(self, name: str) -> None:
        """A worker that is not here will come, or come back."""
        self._away.add(name)

    def give_up(self, name: str) -> None:
        """A worker that was expected will not come."""
        self._away.discard(name)

    def dispatch(self, batch: PrefillBatch, expected_s: float, now: float, *, is_alone: bool) -> str:
        """Give a batch to the worker for which there is room, and return its name.

        `is_alone`: it has the worker for itself.
        """
        name = self._placement.choose()
        assert name is not None, "no prefill worker has room"
        self._placement.dispatched(name, expected_s, now, is_alone=is_alone)
        self._workers[name].in_flight[batch.batch_id] = _Dispatched(batch, expected_s)
        return name

    def take_batch(self, name: str, batch_id: int, now: float, seconds: float = 0.0) -> PrefillBatch:
        """A worker's batch is back after so many seconds; 0 if that says nothing about its speed."""
        worker = self._workers[name]
        batch, expected_s = worker.in_flight.pop(batch_id)
        if not worker.is_draining:
            self._placement.finished(name, expected_s, seconds, now)
        return batch

    def is_sending(self, batch: PrefillBatch, result: PrefillResult) -> None:
        """A worker has computed a batch, which was taken from it, but still sends its pages."""
        self._workers[result.worker].sending[batch.batch_id] = ComputedBatch(batch, result)

    def take_sent(self, name: str, batch_id: int) -> ComputedBatch:
        """A worker sends the pages of a batch no more."""
        return self._workers[name].sending.pop(batch_id)

    def drain(self, name: str) -> None:
        """Give a worker no further batch."""
        if not self._workers[name].is_draining:
            self._workers[name].is_draining = True
            self._draining[name] = self._workers[name]
            self._placement.remove(name)

    def remove_drained(self) -> list[str]:
        """Forget those that drain and have nothing in flight; return their names."""
        if not self._draining:
            return []
        names = [
            name for name, worker in self._draining.items() if not worker.in_flight and not worker.sending
        ]
        for name in names:
            del self._workers[name], self._draining[name]
        self._recomputing.difference_update(names)
        return names

    def remove_lost(self, name: str) -> tuple[list[PrefillBatch], list[ComputedBatch]]:
        """Forget a worker that died; return the batches that it was to compute, and those whose pages it sent."""
        worker = self._workers.pop(name)
        self._draining.pop(name, None)
        self._recomputing.discard(name)
        if not worker.is_draining:
            self._placement.remove(name)
        return [batch for batch, _ in worker.in_flight.values()], list(worker.sending.values())
