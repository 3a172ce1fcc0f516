"""Which workers hang: they have work, and nothing is heard of them. Pure."""

from __future__ import annotations

from collections.abc import Collection

from scheduler.readiness import ProgressWatch


class Watchdog:
    """Owns one `ProgressWatch` for each worker. Time is an argument."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: how long a worker that has work may finish none of it."""
        self._timeout_s = timeout_s
        self._watches: dict[str, ProgressWatch] = {}
        self._named: set[str] = set()

    def progressed(self, worker: str, now: float) -> None:
        """A worker has finished a batch, a step, or a handoff."""
        if worker in self._watches:
            self._watches[worker].progressed(now)
            self._named.discard(worker)

    def overdue(self, working: Collection[str], now: float) -> dict[str, str]:
        """Take in which workers have work now; return those that hang, and what is wrong.

        One that was named is not named again before it has made progress, or has been without work.
        """
        self._watches = {name: watch for name, watch in self._watches.items() if name in working}
        self._named.intersection_update(working)
        problems = {}
        for name in working:
            watch = self._watches.setdefault(name, ProgressWatch(self._timeout_s))
            watch.update(1, now)
            problem = watch.problem(now)
            if problem is not None and name not in self._named:
                self._named.add(name)
                problems[name] = problem
        return problems
