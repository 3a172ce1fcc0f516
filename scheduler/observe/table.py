"""Writes the table of all metrics into a page: ``python -m scheduler.observe.table docs/metrics.md``."""

from __future__ import annotations

import sys
from pathlib import Path

from scheduler.observe.catalogue import CATALOGUE, Metric

_BEGIN, _END = "<!-- table -->\n", "<!-- end of table -->"


def with_table(page: str) -> str:
    """Return the page with a new table between its two marks. Raises `ValueError` if they are not there."""
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"page must hold the lines {_BEGIN.strip()} and {_END}")
    head = "| name | kind | labels | meaning |\n|---|---|---|---|\n"
    return before + begin + head + "".join(map(_row, CATALOGUE)) + end + after


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    buckets = f" Buckets: {', '.join(f'{bound:g}' for bound in metric.buckets)}." if metric.buckets else ""
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help}{buckets} |\n"


def main() -> None:
    """Renew the table of the page that the command line names."""
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
