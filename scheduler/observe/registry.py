"""Counts, in plain numbers: what is counted per token and per step must cost next to nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection

from scheduler.messages import Figures
from scheduler.observe.catalogue import CATALOGUE, Metric

_BY_NAME = {metric.name: metric for metric in CATALOGUE}

Labels = tuple[str, ...]


class Registry:
    """Owns the values of the catalogue's metrics in one process. For one thread."""

    def __init__(self) -> None:
        self._counters: dict[Metric, dict[Labels, float]] = {}
        self._gauges: dict[Metric, dict[Labels, float]] = {}
        # Sum of the values first, then how many fell into each bucket, above the last one included.
        self._histograms: dict[Metric, dict[Labels, list[float]]] = {}

    def inc(self, metric: Metric, *labels: str, by: float = 1) -> None:
        """Add to a counter. By 0, it is shown from now on: a rate needs a first value to begin with."""
        try:
            self._counters[metric][labels] += by
        except KeyError:
            _check(metric, "counter", labels)
            self._counters.setdefault(metric, {})[labels] = by

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        """Set a gauge."""
        try:
            self._gauges[metric][labels] = value
        except KeyError:
            self._gauges[metric] = {labels: value}
        _check(metric, "gauge", labels)

    def values(self, metric: Metric) -> dict[Labels, float]:
        """Return the values of a counter or gauge, by its labels."""
        values = self._counters if metric.kind == "counter" else self._gauges
        return dict(values.get(metric, {}))

    def clear(self, metric: Metric) -> None:
        """Forget all values of a gauge."""
        self._gauges.pop(metric, None)

    def drop(self, metric: Metric, *labels: str) -> None:
        """Forget a value of a gauge."""
        del self._gauges[metric][labels]

    def observe(self, metric: Metric, value: float, *labels: str) -> None:
        """Add a value to a histogram."""
        try:
            series = self._histograms[metric][labels]
        except KeyError:
            series = self._begin(metric, labels)
        series[0] += value
        series[1 + bisect_left(metric.buckets, value)] += 1

    def declare(self, *metrics: Metric, labels: Labels = ()) -> None:
        """Show counters and histograms from now on, at 0 if nothing was counted yet."""
        for metric in metrics:
            if metric.kind == "counter":
                self.inc(metric, *labels, by=0)
            elif labels not in self._histograms.get(metric, {}):
                self._begin(metric, labels)

    def figures(self, *, without: Collection[Metric] = ()) -> Figures:
        """Return all values, except those of some metrics."""
        return Figures(
            counters={m.name: dict(series) for m, series in self._counters.items() if m not in without},
            gauges={m.name: dict(series) for m, series in self._gauges.items() if m not in without},
            histograms={
                m.name: {labels: tuple(values) for labels, values in series.items()}
                for m, series in self._histograms.items()
                if m not in without
            },
        )

    def take(self) -> Figures:
        """Return what was counted since the last call, and all gauges; counters and histograms begin anew."""
        figures = self.figures()
        self._counters.clear()
        self._histograms.clear()
        return figures

    def add(self, figures: Figures) -> None:
        """Add what another process counted, and set the gauges that it set."""
        for name, counts in figures.counters.items():
            for labels, count in counts.items():
                self.inc(_BY_NAME[name], *labels, by=count)
        for name, values in figures.gauges.items():
            for labels, value in values.items():
                self.set(_BY_NAME[name], value, *labels)
        for name, histograms in figures.histograms.items():
            metric = _BY_NAME[name]
            mine = self._histograms.setdefault(metric, {})
            for labels, series in histograms.items():
                known = mine.get(labels)
                mine[labels] = (
                    list(series) if known is None else list(map(sum, zip(known, series, strict=True)))
                )

    def _begin(self, metric: Metric, labels: Labels) -> list[float]:
        _check(metric, "histogram", labels)
        series = [0.0] * (2 + len(metric.buckets))
        self._histograms.setdefault(metric, {})[labels] = series
        return series


def _check(metric: Metric, kind: str, labels: Labels) -> None:
    assert metric.kind == kind, f"{metric.name} is a {metric.kind}"
    assert len(labels) == len(metric.labels), f"{metric.name} has the labels {metric.labels}, got {labels}"
