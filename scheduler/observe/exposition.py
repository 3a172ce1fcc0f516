"""Prometheus' text format, version 0.0.4. In our own few lines: a scrape must cost little, however many workers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from scheduler.messages import Figures
from scheduler.observe.catalogue import CATALOGUE, Metric, number_text

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(figures: Figures, constant_labels: Mapping[str, str]) -> str:
    """Return the text of all figures, each line with the constant labels besides its own."""
    lines: list[str] = []
    common = _pairs(constant_labels.keys(), constant_labels.values())
    for metric in CATALOGUE:
        if metric.kind == "histogram":
            series = figures.histograms.get(metric.name)
            if series:
                lines += _head(metric)
                for labels, values in series.items():
                    lines += _histogram(metric, values, ",".join([*common, *_pairs(metric.labels, labels)]))
            continue
        values_of = figures.counters if metric.kind == "counter" else figures.gauges
        single = values_of.get(metric.name)
        if single:
            lines += _head(metric)
            for labels, value in single.items():
                lines.append(
                    f"{metric.name}{{{','.join([*common, *_pairs(metric.labels, labels)])}}} {number_text(value)}"
                )
    return "\n".join(lines) + "\n"


def _head(metric: Metric) -> tuple[str, str]:
    text = metric.help.replace("\\", "\\\\").replace("\n", "\\n")
    return f"# HELP {metric.name} {text}", f"# TYPE {metric.name} {metric.kind}"


def _histogram(metric: Metric, values: Sequence[float], labels: str) -> Iterator[str]:
    """Yield the lines of a series: its sum, and how many values fell into each bucket, as a `Registry` has them."""
    counts = list(accumulate(values[1:]))
    start = f"{metric.name}_bucket{{{labels}{',' if labels else ''}le="
    for bound, count in zip((*metric.buckets, math.inf), counts, strict=True):
        yield f'{start}"{number_text(bound)}"}} {number_text(count)}'
    yield f"{metric.name}_sum{{{labels}}} {number_text(values[0])}"
    yield f"{metric.name}_count{{{labels}}} {number_text(counts[-1])}"


def _pairs(names: Iterable[str], values: Iterable[str]) -> list[str]:
    return [f'{name}="{_escape(value)}"' for name, value in zip(names, values, strict=True)]


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
