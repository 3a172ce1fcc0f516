"""How long a worker takes for a prefill batch, by the bucket to which the batch is padded."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import accumulate
from math import inf
from typing import Self

_FORMAT = "purefill-cost-model-1"
_NEWEST_WEIGHT = 0.1
"""Weight of the newest observation in the moving average of its bucket."""
_MAX_RATIO = 2.0
"""An observation counts as at most this much more, or less, than what was expected: hiccups happen."""
_SATURATION_MARGIN = 0.05
"""A bucket is saturated if no other is cheaper per token by more than this."""


def seconds_by_tokens(seconds_by_bucket: Mapping[str, float]) -> dict[int, float]:
    """Return the seconds of each token bucket from those of buckets named as ``512x8``, tokens by slots.

    Of buckets that differ in their slots only, the slowest counts.
    """
    table: dict[int, float] = {}
    for name, seconds in seconds_by_bucket.items():
        num_tokens = int(name.split("x")[0])
        table[num_tokens] = max(seconds, table.get(num_tokens, 0.0))
    return table


class CostModel:
    """Seconds of one batch by its tokens: a table over token buckets, refined by what is observed.

    Owns the table. More tokens never cost less. More tokens than the largest bucket holds are computed in
    chunks, as the worker does it: whole largest buckets, and the bucket of what is left.
    """

    def __init__(self, seconds_by_bucket: Mapping[int, float]) -> None:
        """Make a model from the seconds of each token bucket.

        Raises `ValueError` if there is no bucket, or one of no tokens or seconds.
        """
        self.replace(seconds_by_bucket)

    def replace(self, seconds_by_bucket: Mapping[int, float]) -> None:
        """Forget the table, and the buckets, for another. Raises `ValueError` as the constructor does."""
        if not seconds_by_bucket:
            raise ValueError("seconds_by_bucket must not be empty")
        for num_tokens, seconds in seconds_by_bucket.items():
            if num_tokens < 1 or not 0 < seconds < inf:
                raise ValueError(f"seconds_by_bucket must hold numbers > 0, got {num_tokens}: {seconds}")
        self._buckets = sorted(seconds_by_bucket)
        self._largest = self._buckets[-1]
        # A larger bucket never costs less: where it was measured so, that was noise.
        self._seconds = list(accumulate((seconds_by_bucket[bucket] for bucket in self._buckets), max))
        self._find_saturation()

    @classmethod
    def proportional(cls, buckets: Iterable[int], seconds_per_token: float = 1e-6) -> Self:
        """Make a model for when nothing is known: each token costs the same, padding included."""
        return cls({num_tokens: num_tokens * seconds_per_token for num_tokens in buckets})

    @classmethod
    def interpolated(cls, buckets: Iterable[int], measured: Mapping[int, float]) -> Self:
        """Make a model of these buckets from seconds measured at other token counts (two or more).

        Linear between the measured points and beyond the first and the last. Raises `ValueError` if fewer
        than two points are given.
        """
        points = sorted(measured.items())
        if len(points) < 2:
            raise ValueError(f"measured must hold at least two points, got {len(points)}")

        def line(num_tokens: int) -> float:
            i = min(max(1, bisect_left(points, (num_tokens, 0.0))), len(points) - 1)
            (x0, y0), (x1, y1) = points[i - 1], points[i]
            return max(y0 + (y1 - y0) * (num_tokens - x0) / (x1 - x0), 1e-6)

        return cls({num_tokens: line(num_tokens) for num_tokens in buckets})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote. Raises `ValueError` if it is something else."""
        data = json.loads(text)
        if (
            not isinstance(data, dict)
            or data.get("format") != _FORMAT
            or not isinstance(data.get("seconds"), dict)
        ):
            raise ValueError(f"a cost model must be a JSON object of format {_FORMAT} with seconds by bucket")
        return cls({int(num_tokens): float(seconds) for num_tokens, seconds in data["seconds"].items()})

    def to_json(self) -> str:
        """Write the table as text."""
        return json.dumps({"format": _FORMAT, "seconds": self.table()})

    def table(self) -> dict[int, float]:
        """Return the seconds of each token bucket."""
        return dict(zip(self._buckets, self._seconds, strict=True))

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest bucket."""
        return self._largest

    @property
    def saturation_tokens(self) -> int:
        """Tokens of the smallest bucket from which on larger batches are no cheaper per token."""
        return self._saturation_tokens

    @property
    def saturated_seconds_per_token(self) -> float:
        """Seconds per token of a batch that fills that bucket."""
        return self._saturated_seconds_per_token

    def padded(self, num_tokens: int) -> int:
        """Return how many tokens are computed for a batch of `num_tokens`, padding included."""
        if 0 < num_tokens <= self._largest:
            return self._buckets[bisect_left(self._buckets, num_tokens)]
        chunks, rest = divmod(num_tokens, self._largest)
        return chunks * self._largest + (self._buckets[bisect_left(self._buckets, rest)] if rest else 0)

    def seconds(self, num_tokens: int) -> float:
        """Return the expected seconds of a batch of `num_tokens` tokens, padding not counted."""
        if num_tokens <= self._largest:
            return self._seconds[bisect_left(self._buckets, num_tokens)] if num_tokens else 0.0
        chunks, rest = divmod(num_tokens, self._largest)
        return chunks * self._seconds[-1] + self.seconds(rest)

    def smaller_bucket(self, num_tokens: int) -> int:
        """Return the most tokens that cost less than a batch of `num_tokens`; 0 if there are none."""
        chunks, rest = divmod(num_tokens - 1, self._largest)
        i = bisect_left(self._buckets, rest + 1)
        return chunks * self._largest + (self._buckets[i - 1] if i else 0)

    def buckets_from(self, num_tokens: int) -> list[int]:
        """Return the token counts from `num_tokens` on that need no padding, and no chunk more than it."""
        chunks, rest = divmod(num_tokens - 1, self._largest)
        i = bisect_left(self._buckets, rest + 1)
        return [chunks * self._largest + bucket for bucket in self._buckets[i:]]

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn that a batch of `num_tokens` tokens, padding not counted, took `seconds`."""
        expected = self.seconds(num_tokens)
        if not expected or not seconds > 0:
            return
        ratio = min(max(seconds / expected, 1 / _MAX_RATIO), _MAX_RATIO)
        largest = len(self._buckets) - 1
        i = bisect_left(self._buckets, num_tokens) if num_tokens <= self._largest else largest
        value = self._seconds[i] * (1 + _NEWEST_WEIGHT * (ratio - 1))
        self._seconds[:i] = [min(below, value) for below in self._seconds[:i]]
        self._seconds[i] = value
        self._seconds[i + 1 :] = [max(above, value) for above in self._seconds[i + 1 :]]
        self._find_saturation()

    def _find_saturation(self) -> None:
        per_token = [seconds / num_tokens for num_tokens, seconds in self.table().items()]
        limit = min(per_token) * (1 + _SATURATION_MARGIN)
        i = next(i for i, cost in enumerate(per_token) if cost <= limit)
        self._saturation_tokens, self._saturated_seconds_per_token = self._buckets[i], per_token[i]
