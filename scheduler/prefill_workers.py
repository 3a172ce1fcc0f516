"""The prefill workers as the scheduler's core sees them: what each one has in flight, and who leaves. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler.batching.policies import Workers
from scheduler.messages import PrefillBatch, PrefillResult
from scheduler.placement import PrefillPlacement


class ComputedBatch(NamedTuple):
    """A batch whose pages are on their way to their decode worker."""

    batch: PrefillBatch
    result: PrefillResult


@dataclass(slots=True, kw_only=True)
class _Worker:
    batch: PrefillBatch | None = None
    expected_s: float = 0.0
    """What its batch takes by the cost model."""
    sending: dict[int, ComputedBatch] = field(default_factory=dict)
    is_draining: bool = False


class PrefillWorkers:
    """Owns the batch that each prefill worker computes, at most one, and those whose pages it still sends."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._away: set[str] = set()
        self._draining: dict[str, _Worker] = {}
        self._placement = PrefillPlacement()

    def __contains__(self, name: str) -> bool:
        return name in self._workers

    @property
    def num_idle(self) -> int:
        """Workers that may be given a batch."""
        return self._placement.num_idle

    @property
    def num_open(self) -> int:
        """Workers that take batches, now or later: also those that are expected back."""
        return len(self._workers) - len(self._draining) + len(self._away)

    @property
    def busy(self) -> list[str]:
        """Workers that have a batch to compute, or pages to send."""
        return [name for name, worker in self._workers.items() if worker.batch is not None or worker.sending]

    @property
    def draining(self) -> dict[str, bool]:
        """Whether each worker drains, by name."""
        return {name: worker.is_draining for name, worker in self._workers.items()}

    def view(self, now: float) -> Workers:
        """Return what a batch policy wants to know of them."""
        return self._placement.workers(now)

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

    def dispatch(self, batch: PrefillBatch, expected_s: float, now: float) -> str:
        """Give a batch to the best of the idle workers, and return its name."""
        name = self._placement.choose(expected_s, now)
        assert name is not None, "no prefill worker is idle"
        self._placement.dispatched(name, expected_s, now)
        self._workers[name].batch, self._workers[name].expected_s = batch, expected_s
        return name

    def take_batch(self, name: str, now: float, seconds: float = 0.0) -> PrefillBatch:
        """A worker's batch is back after so many seconds; 0 if that says nothing about its speed."""
        worker = self._workers[name]
        batch, worker.batch = worker.batch, None
        assert batch is not None, f"{name} has no batch"
        if not worker.is_draining:
            self._placement.finished(name, worker.expected_s, seconds, now)
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
            name for name, worker in self._draining.items() if worker.batch is None and not worker.sending
        ]
        for name in names:
            del self._workers[name], self._draining[name]
        return names

    def remove_lost(self, name: str) -> tuple[PrefillBatch | None, list[ComputedBatch]]:
        """Forget a worker that died; return the batch that it computed, and those whose pages it sent."""
        worker = self._workers.pop(name)
        self._draining.pop(name, None)
        if not worker.is_draining:
            self._placement.remove(name)
        return worker.batch, list(worker.sending.values())
