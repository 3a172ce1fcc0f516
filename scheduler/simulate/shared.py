"""Prefill and decode on one device: each goes on more slowly while the other computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from scheduler.simulate.decode_worker import VirtualDecodeWorker
from scheduler.simulate.fleet_costs import FleetCosts


@dataclass(slots=True, kw_only=True)
class _Batch:
    begun_s: float
    left_s: float
    """Of its work, in seconds of a device of its own, at `since_s`."""
    since_s: float
    slowness: float
    done: Callable[[float, float], None]
    ends_s: float = 0.0


class SharedDevices:
    """Owns what prefill workers compute whose device a decode worker shares: that of the same number.

    It is told the time with each call; all times are in seconds.
    """

    def __init__(
        self,
        costs: FleetCosts,
        decode: Mapping[str, VirtualDecodeWorker],
        *,
        at: Callable[[float, Callable[..., None], object], None],
        changed: Callable[[VirtualDecodeWorker], None],
    ) -> None:
        """`at` has something called at a time; `changed` is told of workers whose next event may be another one."""
        self._costs = costs
        self._decode = decode
        self._at = at
        self._changed = changed
        self._batches: dict[str, _Batch] = {}
        """By the decode worker of the same device."""
        self._ahead: dict[str, list[tuple[float, Callable[[float, float], None]]]] = {}
        """What comes after them: seconds, and whom to tell."""

    def begin(
        self, prefill_worker: str, seconds: float, now: float, done: Callable[[float, float], None]
    ) -> None:
        """Compute a batch that takes so long on a device of its own, once the one before it is done.

        `done` is told how long it took, and when.
        """
        name = _neighbour(prefill_worker)
        if name in self._batches:
            self._ahead.setdefault(name, []).append((seconds, done))
        else:
            self._begin(name, seconds, now, done)

    def _begin(self, name: str, seconds: float, now: float, done: Callable[[float, float], None]) -> None:
        batch = _Batch(begun_s=now, left_s=seconds, since_s=now, slowness=1.0, done=done)
        self._batches[name] = batch
        worker = self._decode.get(name)
        if worker is not None:
            self.joined(worker, now)
            batch.slowness = self._slowness(worker)
        self._plan(name, batch)

    def drop(self, prefill_worker: str, now: float) -> None:
        """A prefill worker died."""
        name = _neighbour(prefill_worker)
        self._ahead.pop(name, None)
        self._end(name, now)

    def joined(self, worker: VirtualDecodeWorker, now: float) -> None:
        """A decode worker is there, while a batch may be computed beside it."""
        if worker.name in self._batches:
            worker.slow_down(self._costs.decode_slowdown, now)
            self._changed(worker)

    def stepped(self, name: str, now: float) -> None:
        """A decode worker may have begun or ceased to compute, or be gone."""
        batch = self._batches.get(name)
        if batch is None:
            return
        slowness = self._slowness(self._decode.get(name))
        if slowness != batch.slowness:
            batch.left_s -= (now - batch.since_s) / batch.slowness
            batch.since_s, batch.slowness = now, slowness
            self._plan(name, batch)

    def _slowness(self, worker: VirtualDecodeWorker | None) -> float:
        return self._costs.prefill_slowdown if worker is not None and worker.num_running else 1.0

    def _plan(self, name: str, batch: _Batch) -> None:
        batch.ends_s = batch.since_s + batch.left_s * batch.slowness
        self._at(batch.ends_s, self._computed, (name, batch, batch.ends_s))

    def _computed(self, argument: tuple[str, _Batch, float], now: float) -> None:
        name, batch, planned_s = argument
        if self._batches.get(name) is batch and batch.ends_s == planned_s:
            self._end(name, now)
            batch.done(now - batch.begun_s, now)
            if self._ahead.get(name):
                seconds, done = self._ahead[name].pop(0)
                self._begin(name, seconds, now, done)

    def _end(self, name: str, now: float) -> None:
        self._batches.pop(name, None)
        worker = self._decode.get(name)
        if worker is not None:
            worker.slow_down(1.0, now)
            self._changed(worker)


def _neighbour(prefill_worker: str) -> str:
    return f"decode-{prefill_worker.removeprefix('prefill-')}"
