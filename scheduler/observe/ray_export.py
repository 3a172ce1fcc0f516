"""The same figures through `ray.util.metrics`: each process shows its own at its node's Prometheus endpoint of Ray."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from scheduler.messages import Figures
from scheduler.observe.catalogue import CATALOGUE, Metric, number_text

PERIOD_S = 5.0
"""How often figures are published. Ray collects every 10 s unless told otherwise, and shows a value for twice that."""

_BY_NAME = {metric.name: metric for metric in CATALOGUE}
_Tags = tuple[tuple[str, str], ...]


class RayMirror:
    """Owns Ray's metrics of this process. Ray shows ``purefill_x`` as ``ray_purefill_x``.

    All of them are gauges for Ray, also what counts: a counter or histogram of Ray's would have to be told of every
    token, at some ten microseconds each. `rate` and `histogram_quantile` work on them as on counters.
    """

    def __init__(self, constant_labels: Mapping[str, str]) -> None:
        self._constant = tuple(constant_labels.items())
        self._gauges: dict[str, Any] = {}

    def publish(self, figures: Figures) -> None:
        """Show these values, until Ray has collected twice without a new one."""
        for metric, name, tags, value in _samples(figures):
            self._set(metric, name, tags, value)

    def _set(self, metric: Metric, name: str, tags: _Tags, value: float) -> None:
        from ray.util.metrics import Gauge

        gauge = self._gauges.get(name)
        if gauge is None:
            keys = tuple(key for key, _ in self._constant + tags)
            gauge = self._gauges[name] = Gauge(name, description=metric.help, tag_keys=keys)
        gauge.set(value, tags=dict(self._constant + tags))


def _samples(figures: Figures) -> Iterator[tuple[Metric, str, _Tags, float]]:
    """Yield name, tags and value of each line that the text format would have."""
    for values in (figures.counters, figures.gauges):
        for name, series in values.items():
            metric = _BY_NAME[name]
            for labels, value in series.items():
                yield metric, name, tuple(zip(metric.labels, labels, strict=True)), value
    for name, histograms in figures.histograms.items():
        metric = _BY_NAME[name]
        bounds = [number_text(bound) for bound in (*metric.buckets, math.inf)]
        for labels, numbers in histograms.items():
            tags = tuple(zip(metric.labels, labels, strict=True))
            counts = list(accumulate(numbers[1:]))
            for bound, count in zip(bounds, counts, strict=True):
                yield metric, f"{name}_bucket", (*tags, ("le", bound)), count
            yield metric, f"{name}_sum", tags, numbers[0]
            yield metric, f"{name}_count", tags, counts[-1]
