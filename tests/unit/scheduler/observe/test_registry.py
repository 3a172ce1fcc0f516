from __future__ import annotations

import math
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from scheduler.messages import Figures
from scheduler.observe import catalogue as m
from scheduler.observe.catalogue import CATALOGUE
from scheduler.observe.exposition import render
from scheduler.observe.registry import Registry
from scheduler.observe.table import with_table

REPO = Path(__file__).resolve().parents[4]


def parsed(figures: Figures, **constant: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return every line of the text, as a parser of Prometheus' makers reads it."""
    text = render(figures, constant)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def line(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


def test_values_in_the_text_format() -> None:
    registry = Registry()
    registry.inc(m.REJECTIONS, 'a "quoted"\nname\\')
    registry.inc(m.REJECTIONS, "overloaded", by=2)
    registry.set(m.LIVE_REQUESTS, 3)
    for value in (0.001, 0.0015, 0.003, 7):
        registry.observe(m.INTER_TOKEN, value)
    found = parsed(registry.figures(), model="m")
    assert found[line(m.REJECTIONS.name, model="m", reason='a "quoted"\nname\\')] == 1
    assert found[line(m.REJECTIONS.name, model="m", reason="overloaded")] == 2
    assert found[line(m.LIVE_REQUESTS.name, model="m")] == 3
    counts = [
        found[line(f"{m.INTER_TOKEN.name}_bucket", model="m", le=str(b))] for b in (0.001, 0.002, 0.003)
    ]
    assert counts == [1, 2, 3]  # a bound belongs to its bucket
    assert found[line(f"{m.INTER_TOKEN.name}_bucket", model="m", le="5.0")] == 3
    assert found[line(f"{m.INTER_TOKEN.name}_bucket", model="m", le="+Inf")] == 4
    assert found[line(f"{m.INTER_TOKEN.name}_count", model="m")] == 4
    assert found[line(f"{m.INTER_TOKEN.name}_sum", model="m")] == pytest.approx(7.0055)


def test_what_is_taken_adds_up_elsewhere() -> None:
    """Counters and histograms begin anew when they are taken, gauges stay."""
    here, there = Registry(), Registry()
    for _ in range(3):
        here.inc(m.PROMPT_TOKENS, by=5)
        here.observe(m.TIME_TO_FIRST_TOKEN, 0.25)
        here.set(m.START_TIME, 9, "api", "api-0")
        there.add(here.take())
    assert there.figures() == Figures(
        counters={m.PROMPT_TOKENS.name: {(): 15}},
        gauges={m.START_TIME.name: {("api", "api-0"): 9}},
        histograms={m.TIME_TO_FIRST_TOKEN.name: {(): pytest.approx((0.75, *[0] * 9, 3, *[0] * 9))}},
    )
    assert here.take() == Figures(gauges={m.START_TIME.name: {("api", "api-0"): 9}})


def test_names_follow_prometheus_conventions() -> None:
    assert len({metric.name for metric in CATALOGUE}) == len(CATALOGUE)
    for metric in CATALOGUE:
        assert metric.name.startswith("purefill_")
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert math.inf not in metric.buckets
        assert "model" not in metric.labels


def test_the_table_of_the_documentation_is_up_to_date() -> None:
    page = (REPO / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert with_table(page) == page, "run: python -m scheduler.observe.table docs/metrics.md"
