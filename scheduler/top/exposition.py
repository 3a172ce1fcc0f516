"""Scrapes of `/metrics`, and what happened between two of them. Pure: time is an argument."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
Series = Mapping[Labels, float]

START_TIME = "purefill_start_time_seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """One answer of `/metrics`."""

    at: float
    """When it came, in seconds of any clock that only grows."""
    series: Mapping[str, Series]
    """Samples by name. A metric that is known but has no sample yet is there, without samples."""
    counters: frozenset[str]
    """Names of the samples that only grow while the service runs."""

    def value(self, name: str, **labels: str) -> float | None:
        """Return a metric's value, summed over all samples with these labels; None if there is no such metric.

        A sample that lacks one of the labels counts: not every metric has every label.
        """
        chosen = self._chosen(name, labels)
        return None if chosen is None else sum(value for _, value in chosen)

    def by(self, name: str, label: str, **labels: str) -> dict[str, float] | None:
        """Return the values of a metric by a label, summed over all others; None if there is no such metric.

        `labels` choose samples, as for `value`.
        """
        chosen = self._chosen(name, labels)
        if chosen is None:
            return None
        sums: defaultdict[str, float] = defaultdict(float)
        for own, value in chosen:
            sums[own.get(label, "")] += value
        return dict(sums)

    def _chosen(self, name: str, labels: Mapping[str, str]) -> list[tuple[dict[str, str], float]] | None:
        if name not in self.series:
            return None
        samples = [(dict(key), value) for key, value in self.series[name].items()]
        return [
            (own, value)
            for own, value in samples
            if all(own.get(label, text) == text for label, text in labels.items())
        ]

    def began_anew(self, earlier: Scrape) -> bool:
        """Whether the scheduler, whose counters these are, was started again since `earlier`."""
        started, before = (s.value(START_TIME, pool="scheduler") for s in (self, earlier))
        return started != before or any(
            value < earlier.series.get(name, {}).get(key, 0.0)
            for name in self.counters
            for key, value in self.series[name].items()
        )


def parse_scrape(text: str, at: float) -> Scrape:
    """Return the scrape that holds `text`, in Prometheus' text format. Raises ValueError if it is not that."""
    series: dict[str, dict[Labels, float]] = {}
    counters: set[str] = set()
    for family in text_string_to_metric_families(text):
        names = _sample_names(family.name, family.type)
        counters |= names if family.type in ("counter", "histogram") else set()
        for name in names:
            series.setdefault(name, {})
        for sample in family.samples:
            series.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return Scrape(at=at, series=series, counters=frozenset(counters))


def _sample_names(family: str, kind: str) -> set[str]:
    if kind == "counter":
        return {f"{family}_total"}
    if kind == "histogram":
        return {f"{family}_bucket", f"{family}_sum", f"{family}_count"}
    return {family}


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The time between two scrapes of one run of the service."""

    start: Scrape
    end: Scrape

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.end.at - self.start.at

    def increase(self, name: str, **labels: str) -> float | None:
        """Return by how much a counter grew; None if there is no such metric."""
        after = self.end.value(name, **labels)
        return None if after is None else after - (self.start.value(name, **labels) or 0.0)

    def rate(self, name: str, **labels: str) -> float | None:
        """Return how fast a counter grew, per second; None if there is no such metric."""
        grown = self.increase(name, **labels)
        return None if grown is None or self.seconds <= 0 else grown / self.seconds

    def rates(self, name: str, label: str, **labels: str) -> dict[str, float] | None:
        """Return how fast a counter grew by the values of a label; None if there is no such metric."""
        after = self.end.by(name, label, **labels)
        if after is None or self.seconds <= 0:
            return None
        before = self.start.by(name, label, **labels) or {}
        return {key: (value - before.get(key, 0.0)) / self.seconds for key, value in sorted(after.items())}

    def mean(self, histogram: str, **labels: str) -> float | None:
        """Return the mean of what a histogram observed; None if it observed nothing."""
        total = self.increase(f"{histogram}_sum", **labels)
        count = self.increase(f"{histogram}_count", **labels)
        return total / count if total is not None and count else None

    def quantile(self, histogram: str, q: float) -> float | None:
        """Return the `q` quantile of what a histogram observed, over all its labels; None if that was nothing.

        Interpolates within a bucket, as Prometheus' `histogram_quantile` does: the smallest bucket begins at 0,
        and what lies above the largest bound counts as that bound.
        """
        after = self.end.by(f"{histogram}_bucket", "le")
        if after is None:
            return None
        before = self.start.by(f"{histogram}_bucket", "le") or {}
        counts = sorted((float(le), count - before.get(le, 0.0)) for le, count in after.items())
        if len(counts) < 2 or counts[-1][1] <= 0:
            return None
        rank = q * counts[-1][1]
        for (lower, below), (upper, upto) in pairwise([(0.0, 0.0), *counts[:-1]]):
            if upto >= rank and upto > below:
                return lower + (upper - lower) * (rank - below) / (upto - below)
        return counts[-2][0]


class History:
    """Owns the scrapes of the last seconds."""

    def __init__(self, span_s: float) -> None:
        """Keep as many scrapes as `span_s` seconds need."""
        self._span_s = span_s
        self._scrapes: list[Scrape] = []

    def add(self, scrape: Scrape) -> bool:
        """Take in the newest scrape. Returns whether the service was started again: then those before are gone."""
        began_anew = bool(self._scrapes) and scrape.began_anew(self._scrapes[-1])
        if began_anew:
            self._scrapes.clear()
        self._scrapes.append(scrape)
        while len(self._scrapes) > 2 and scrape.at - self._scrapes[1].at >= self._span_s:
            del self._scrapes[0]
        return began_anew

    def interval(self) -> Interval | None:
        """Return the time from the oldest to the newest scrape; None if nothing was scraped yet.

        After only one scrape it has no length, and nothing has a rate.
        """
        return Interval(start=self._scrapes[0], end=self._scrapes[-1]) if self._scrapes else None
