"""The terminal's view of `Figures`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.bar import Bar
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from scheduler.top.figures import QUANTILES, Figures, PoolPages

DASH = "–"  # noqa: RUF001 - an en dash: what is not known
_TWO_COLUMNS = 96
"""Narrower terminals have the panels below each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """All that is shown at one moment. Fits itself to the width of the terminal."""

    title: str
    """Which service."""
    clock: str
    """When."""
    figures: Figures | None
    """None: nothing came yet."""
    note: str = ""
    """What is wrong, or is to be known."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines, in one column or two."""
        yield self._head()
        if self.note:
            yield Text(self.note, style="bold yellow")
        figures = self.figures
        if figures is None:
            return
        left = [_requests(figures), _times(figures)]
        right = [_batches(figures), _buckets(figures)]
        below = [_workers(figures), _pages(figures)]
        if options.max_width < _TWO_COLUMNS:
            yield Group(left[0], right[0], left[1], right[1], *below)
            return
        columns = Table.grid(expand=True)
        columns.add_column(ratio=1)
        columns.add_column(ratio=1)
        columns.add_row(Group(*left), Group(*right))
        yield Group(columns, *below)

    def _head(self) -> RenderableType:
        span = f"last {self.figures.seconds:.0f} s" if self.figures and self.figures.seconds else ""
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(overflow="ellipsis", no_wrap=True, ratio=1)
        head.add_column(justify="right", no_wrap=True)
        figures = self.figures
        names = [figures.version, figures.model] if figures else []
        what = "  ".join(name for name in (*names, self.title) if name)
        head.add_row(Text.assemble(("purefill ", "bold"), what), f"{span}  {self.clock}")
        return head


def number(value: float | None, unit: str = "") -> str:
    """Return a figure with three digits or so, and its unit; a dash for what is not known."""
    if value is None:
        return DASH
    if value >= 1000:
        text = f"{value:,.0f}"
    elif value >= 100 or value == round(value):
        text = f"{value:.0f}"
    else:
        text = f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    return text + unit


def duration(seconds: float | None) -> str:
    """Return a time in the unit that suits it; a dash if it is not known."""
    if seconds is None:
        return DASH
    if seconds >= 1:
        return number(seconds, " s")
    return number(seconds * 1000, " ms") if seconds >= 0.001 or seconds == 0 else number(seconds * 1e6, " µs")


def share(value: float | None) -> str:
    """Return 0 to 1 in percent; a dash if it is not known."""
    return DASH if value is None else f"{100 * value:.1f} %"


def _requests(figures: Figures) -> RenderableType:
    table = _grid()
    waiting = f"{number(figures.waiting_requests)}  ({number(figures.waiting_tokens)} tokens)"
    table.add_row("waiting", waiting)
    table.add_row("not ended", number(figures.live_requests))
    table.add_row("prompt tokens", number(figures.prompt_tokens, " /s"))
    table.add_row("output tokens", number(figures.output_tokens, " /s"))
    table.add_row("ended", _listed(figures.requests))
    table.add_row("turned away", _listed(figures.rejections, style="yellow"))
    table.add_row("queued again", _listed(figures.requeues, style="yellow"))
    return _panel("Requests", table)


def _batches(figures: Figures) -> RenderableType:
    sizes = _grid()
    mean = f"{number(figures.batch_requests)} requests, {number(figures.batch_tokens)} tokens"
    sizes.add_row("in a batch", mean)
    sizes.add_row("padding", share(figures.padding_share))
    return _panel("Batches a second, by what made them leave", Group(_rates(figures.batches), sizes))


def _buckets(figures: Figures) -> RenderableType:
    eager = _grid()
    eager.add_row("without a graph", _listed(figures.eager_steps, style="bold red"))
    return _panel("Prefill passes a second, by bucket", Group(_rates(figures.replays), eager))


def _times(figures: Figures) -> RenderableType:
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("")
    for q in QUANTILES:
        table.add_column(f"p{100 * q:g}", justify="right", header_style="dim")
    for title, values in figures.times.items():
        table.add_row(Text(title, style="cyan"), *map(duration, values))
    return _panel("Times", table)


def _workers(figures: Figures) -> RenderableType:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, expand=True)
    table.add_column("", style="cyan", no_wrap=True)
    for head in ("busy", "passes\n/s", "tokens\n/s", "FLOPs", "died"):
        table.add_column(head, justify="right", header_style="dim", no_wrap=True)
    for worker in figures.workers:
        table.add_row(
            worker.name,
            share(worker.busy_share),
            number(worker.passes),
            number(worker.tokens),
            share(worker.utilisation),
            number(worker.restarts),
        )
    if not figures.workers:
        table.add_row(*[DASH] * 6)
    states = figures.worker_states or {}
    title = ", ".join(f"{number(count)} {state}" for state, count in states.items() if count)
    return _panel(f"Workers: {title}" if title else "Workers", table)


def _pages(figures: Figures) -> RenderableType:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, expand=True)
    table.add_column("", style="cyan", no_wrap=True)
    table.add_column("", ratio=1)
    for state in ("used", "reserved", "free"):
        table.add_column(state, justify="right", header_style="dim")
    for pool in figures.pages:
        counts = map(number, (pool.used, pool.reserved, pool.free))
        table.add_row(pool.worker, _filled(pool), *counts)
    if not figures.pages:
        table.add_row(DASH, "", DASH, DASH, DASH)
    return _panel("KV pages", table)


def _filled(pool: PoolPages) -> RenderableType:
    taken = (pool.used or 0) + (pool.reserved or 0)
    return Bar(max(pool.total, 1), 0, taken, color="magenta", bgcolor="grey23")


def _rates(rates: Mapping[str, float] | None) -> RenderableType:
    """Return one row for each rate, with a bar; none was counted yet: a dash."""
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(ratio=1)
    table.add_column(justify="right", no_wrap=True)
    highest = max([*(rates or {}).values(), 1e-9])
    for name, rate in _by_size(rates):
        table.add_row(name, Bar(highest, 0, rate, color="green"), number(rate))
    if not rates:
        table.add_row(DASH, "", "")
    return table


def _by_size(rates: Mapping[str, float] | None) -> Sequence[tuple[str, float]]:
    """Return the rates, those with leading figures in the name by these, the others by name."""

    def key(item: tuple[str, float]) -> tuple[int, str]:
        digits = item[0].partition("x")[0]
        return (int(digits) if digits.isdigit() else 0, item[0])

    return sorted((rates or {}).items(), key=key)


def _listed(rates: Mapping[str, float] | None, style: str = "") -> Text:
    """Return the rates that are not 0 in one line, in `style`."""
    if rates is None:
        return Text(DASH)
    moving = [f"{name} {number(rate)} /s" for name, rate in rates.items() if rate > 0]
    return Text(", ".join(moving), style=style) if moving else Text("0 /s")


def _grid() -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    return table


def _panel(title: str, content: RenderableType) -> Panel:
    return Panel(content, title=title, title_align="left", border_style="dim", padding=(0, 1))
