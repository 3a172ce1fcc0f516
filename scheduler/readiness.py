"""Readiness: is what was accepted making progress?"""

from __future__ import annotations


class ProgressWatch:
    """Knows when work last went on. Time is an argument."""

    def __init__(self, stall_s: float) -> None:
        """`stall_s`: how long nothing may happen while there is something to do."""
        self._stall_s = stall_s
        self._last_s: float | None = None  # None: nothing to do

    def update(self, num_live: int, now: float) -> None:
        """So many requests have not ended."""
        if num_live == 0:
            self._last_s = None
        elif self._last_s is None:
            self._last_s = now

    def progressed(self, now: float) -> None:
        """A batch or a step is done."""
        if self._last_s is not None:
            self._last_s = now

    def problem(self, now: float) -> str | None:
        """Return what is wrong, or None."""
        if self._last_s is None or now - self._last_s < self._stall_s:
            return None
        return f"there is work, but no step was finished for {now - self._last_s:.0f} s"
