"""How a prefill worker leaves decode some of the device that both compute on."""

from __future__ import annotations


class Pacer:
    """Owns when the next batch may begin, so that a share of the time is decode's alone while it has something to do.

    Two processes on one GPU take turns, so while a batch is computed a decode step takes about twice as long. This
    bounds how much of the time that is so.
    """

    def __init__(self, decode_share: float) -> None:
        """`decode_share` of the time, >= 0 and < 1, is without prefill."""
        self._pause_per_second = decode_share / (1 - decode_share)
        self._resume_at = float("-inf")

    def computed(self, seconds: float, now: float) -> None:
        """A batch that took `seconds` has ended `now`."""
        self._resume_at = now + seconds * self._pause_per_second

    def wait_s(self, now: float, *, is_decoding: bool) -> float:
        """Return how long to wait before a batch is begun."""
        return max(self._resume_at - now, 0.0) if is_decoding else 0.0
