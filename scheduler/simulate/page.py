"""One HTML page with the figures and plots of a run. It needs nothing from anywhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from scheduler.simulate.collector import Collector
from scheduler.simulate.report import table

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BOTTOM = 470, 240, 56, 24, 34
"""In pixels; half of the last label of the x axis is in the margin to the right."""
_COLOR = "#1f77b4"
Points = Sequence[tuple[float, float]]


def page(summary: Mapping[str, Any], collector: Collector) -> str:
    """Return the page."""
    c, fleet = collector, summary["fleet"]
    per_s = 1 / c.arrivals_over_time.width_s
    prefill = 1 / (c.prefill_over_time.width_s * fleet["prefill_workers"])
    tokens = 1 / c.tokens_over_time.width_s
    sizes = [(float(n), float(k)) for n, k in sorted(c.batch_requests.items())]
    plots = [
        _plot("Time to first token", "ms", "share of requests", _in_ms(c.ttft.curve())),
        _plot("Time between tokens", "ms", "share of tokens", _in_ms(c.itl.curve())),
        _plot("Whole requests", "ms", "share of requests", _in_ms(c.e2e.curve())),
        _plot("Batch sizes", "requests", "batches", sizes, bars=True),
        _plot("Queue", "s", "most requests waiting", c.queue_over_time.points()),
        _plot("Arrivals", "s", "requests a second", c.arrivals_over_time.points(per_s)),
        _plot("Prefill workers", "s", "share of time busy", c.prefill_over_time.points(prefill)),
        _plot("Answers", "s", "tokens a second", c.tokens_over_time.points(tokens)),
    ]
    sources = "".join(
        f"<li>{escape(name)}: {escape(text)}</li>" for name, text in summary["cost_model"]["sources"].items()
    )
    return (
        "<!doctype html><meta charset=utf-8><title>purefill simulate</title>"
        "<style>body{font:14px sans-serif;margin:2em}svg{margin:6px}pre{background:#f4f4f4;padding:1em}</style>"
        f"<h1>purefill simulate</h1><pre>{escape(table(summary))}</pre>{''.join(plots)}"
        f"<h2>Where the cost model's figures come from</h2><ul>{sources}</ul>\n"
    )


def _in_ms(points: Points) -> Points:
    return [(1000 * x, y) for x, y in points]


def _plot(title: str, x_label: str, y_label: str, line: Points, *, bars: bool = False) -> str:
    x_most = max((x for x, _ in line), default=0.0) or 1.0
    y_most = max((y for _, y in line), default=0.0) or 1.0
    inner_w, inner_h = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _BOTTOM - 24

    def at(x: float, y: float) -> str:
        return f"{_LEFT + inner_w * x / x_most:.1f},{24 + inner_h * (1 - y / y_most):.1f}"

    parts = [
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" font-size="11" role="img" aria-label="{escape(title)}">',
        f'<text x="{_LEFT}" y="14" font-weight="bold">{escape(title)}</text>',
        f'<polyline points="{at(0, y_most)} {at(0, 0)} {at(x_most, 0)}" fill="none" stroke="#888"/>',
    ]
    for i in range(5):
        x, y = x_most * i / 4, y_most * i / 4
        parts.append(_text(at(x, 0), 0, 13, _figure(x), "middle"))
        parts.append(_text(at(0, y), -4, 4, _figure(y), "end"))
    parts.append(_text(f"{_LEFT + inner_w / 2},{_HEIGHT - 4}", 0, 0, x_label, "middle"))
    parts.append(_text(f"{_WIDTH - _RIGHT},14", 0, 0, y_label, "end"))
    if bars:
        parts += [
            f'<polyline points="{at(x, 0)} {at(x, y)}" stroke="{_COLOR}" stroke-width="6"/>' for x, y in line
        ]
    else:
        path = " ".join(at(x, y) for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{_COLOR}"/>')
    return "".join(parts) + "</svg>"


def _text(at: str, dx: float, dy: float, text: str, anchor: str) -> str:
    x, y = at.split(",")
    return f'<text x="{x}" y="{y}" dx="{dx}" dy="{dy}" text-anchor="{anchor}">{escape(text)}</text>'


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
