"""Distributions and series of a size that does not grow with what is put in."""

from __future__ import annotations

from collections import defaultdict
from math import ceil, exp, log

_RATIO = 1.01
_LOG = log(_RATIO)
_BINS_PER_E = 1 / _LOG
_LEAST = 1e-9
_FIRST_BIN = 10_000
"""Above the number of bins below 1, so that all bins have numbers > 0, for which `int` rounds down."""


class LogHistogram:
    """Positive values in bins that are 1 % wide, so that quantiles are right to half a percent."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self._bins: defaultdict[int, int] = defaultdict(int)

    def add(self, value: float, weight: int = 1) -> None:
        """Take in a value `weight` times. What is below a nanosecond counts as one."""
        self._bins[int(log(value if value > _LEAST else _LEAST) * _BINS_PER_E + (_FIRST_BIN + 0.5))] += weight
        self.count += weight
        self.total += value * weight

    def add_range(self, first: float, last: float, num_values: int, weight: int) -> None:
        """Take in `num_values` values that rise evenly from `first` to `last`, each `weight` times."""
        if last <= first * _RATIO:
            self.add((first + last) / 2, num_values * weight)
            return
        parts = min(num_values, 1 + ceil(log(last / first) / _LOG))
        for i in range(parts):
            size = num_values * (i + 1) // parts - num_values * i // parts
            self.add(first + (last - first) * (i + 0.5) / parts, size * weight)

    @property
    def mean(self) -> float:
        """Mean of all values; 0 if there are none."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, q: float) -> float:
        """Return the value that the share `q` does not exceed; 0 if there are none."""
        wanted, seen = q * self.count, 0
        for i in sorted(self._bins):
            seen += self._bins[i]
            if seen >= wanted:
                return exp((i - _FIRST_BIN) * _LOG)
        return 0.0

    def curve(self, num_points: int = 100) -> list[tuple[float, float]]:
        """Return points (value, share of the values that do not exceed it) of the distribution."""
        return [(self.quantile(i / num_points), i / num_points) for i in range(1, num_points + 1)]


class TimeSeries:
    """Sums or maxima by time, in at most 240 bins, which become twice as wide whenever they do not suffice."""

    _MAX_BINS = 240

    def __init__(self, *, is_maximum: bool = False, first_width_s: float = 0.5) -> None:
        self.width_s = first_width_s
        self._is_maximum = is_maximum
        self._bins: list[float] = []

    def add(self, time_s: float, value: float) -> None:
        """Take in a value at a time >= 0."""
        i = int(time_s / self.width_s)
        while i >= self._MAX_BINS:
            self._halve()
            i = int(time_s / self.width_s)
        if i >= len(self._bins):
            self._bins += [0.0] * (i + 1 - len(self._bins))
        self._bins[i] = max(self._bins[i], value) if self._is_maximum else self._bins[i] + value

    def points(self, scale: float = 1.0) -> list[tuple[float, float]]:
        """Return (seconds, value times `scale`), at the middle of each bin."""
        return [((i + 0.5) * self.width_s, value * scale) for i, value in enumerate(self._bins)]

    def _halve(self) -> None:
        pairs = (self._bins[i : i + 2] for i in range(0, len(self._bins), 2))
        self._bins = [max(pair) if self._is_maximum else sum(pair) for pair in pairs]
        self.width_s *= 2
