from __future__ import annotations

import io
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from rich.console import Console

from scheduler.cli import main
from scheduler.errors import UnavailableError
from scheduler.top.command import TopOptions, run_top
from scheduler.top.exposition import History, Interval, Scrape, parse_scrape
from scheduler.top.figures import Figures, figures_of
from scheduler.top.screen import Screen, duration, number, share
from tests.support.exposition import AFTER, BEFORE

UNKNOWN = "–"  # noqa: RUF001


def interval(before: str = BEFORE, after: str = AFTER, seconds: float = 10.0) -> Interval:
    return Interval(start=parse_scrape(before, 100.0), end=parse_scrape(after, 100.0 + seconds))


def drawn(figures: Figures | None, width: int, note: str = "") -> str:
    console = Console(file=io.StringIO(), width=width, height=100, force_terminal=False, color_system=None)
    console.print(Screen(title="http://here", clock="12:00:00", figures=figures, note=note))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_figures_are_what_happened_between_two_scrapes() -> None:
    figures = figures_of(interval())
    assert (figures.model, figures.version, figures.seconds) == ("tiny", "0.1.0", 10.0)
    assert (figures.waiting_requests, figures.waiting_tokens, figures.live_requests) == (5, 120, 9)
    assert figures.batches == {"full": 2.0, "timeout": 0.5}
    assert figures.requests == {"stop": 1.0, "cancelled": 0.0}
    assert figures.rejections == {"overloaded": 0.1}
    assert figures.prompt_tokens == 60.0
    assert figures.output_tokens == 200.0
    assert figures.padding_share == pytest.approx(0.25)
    assert figures.batch_requests == 4.0
    # Of the passes in a bucket only those of prefill.
    assert figures.replays == {"128x8": 0.5, "512x8": 2.0}
    assert figures.eager_steps == {"too_long": 0.2}
    assert figures.worker_states == {"ready": 2, "dead": 1}


def test_figures_of_workers() -> None:
    prefill, decode = figures_of(interval()).workers
    assert (prefill.name, prefill.pool, prefill.busy_share, prefill.passes, prefill.tokens) == (
        "prefill-0", "prefill", 0.5, 2.5, 60.0,
    )  # fmt: skip
    assert prefill.utilisation == pytest.approx(0.4)
    assert prefill.restarts == 1
    assert (decode.name, decode.busy_share, decode.passes, decode.tokens) == ("decode-0", 0.8, 20.0, 200.0)
    assert decode.utilisation is None
    (pages,) = figures_of(interval()).pages
    assert (pages.worker, pages.used, pages.reserved, pages.free, pages.total) == ("decode-0", 6, 2, 24, 32)


def test_quantiles_are_interpolated_in_their_bucket() -> None:
    # Ten new values: none up to 0.1, eight up to 0.2, two beyond the last bound.
    times = figures_of(interval()).times
    assert times["first token"] == pytest.approx((0.1 + 0.1 * 5 / 8, 0.2, 0.2))
    assert times["whole request"] == (None, None, None), "nothing was observed"
    assert times["handoff"] == (None, None, None), "the service does not tell"


def test_what_the_service_does_not_tell_is_a_dash() -> None:
    bare = "# TYPE purefill_queue_requests gauge\npurefill_queue_requests 3\n"
    figures = figures_of(interval(bare, bare))
    assert figures.waiting_requests == 3
    assert figures.batches is figures.batch_requests is figures.padding_share is figures.live_requests is None
    assert (figures.pages, figures.workers, figures.model) == ((), (), None)
    for width in (40, 200):
        text = drawn(figures, width)
        assert text.count(UNKNOWN) > 20
        assert "3" in text


def test_after_one_scrape_there_are_no_rates() -> None:
    history = History(10.0)
    assert history.interval() is None
    history.add(parse_scrape(AFTER, 5.0))
    only = history.interval()
    assert only is not None
    figures = figures_of(only)
    assert (figures.waiting_requests, figures.batches, figures.output_tokens) == (5, None, None)
    assert "KV pages" in drawn(figures, 100)


def test_history_keeps_the_last_seconds() -> None:
    history = History(10.0)
    for at in range(0, 60, 2):
        assert not history.add(parse_scrape(AFTER, float(at)))
    last = history.interval()
    assert last is not None
    assert (last.start.at, last.end.at) == (48.0, 58.0)


@pytest.mark.parametrize(
    "later",
    [
        AFTER.replace('reason="full"} 40', 'reason="full"} 3'),
        AFTER.replace("1700000000", "1700009999"),
    ],
    ids=["a counter fell", "another start"],
)
def test_a_service_that_was_started_again_has_no_negative_rates(later: str) -> None:
    history = History(10.0)
    history.add(parse_scrape(BEFORE, 0.0))
    assert not history.add(parse_scrape(AFTER, 2.0))
    assert history.add(parse_scrape(later, 4.0))
    first = history.interval()
    assert first is not None
    assert figures_of(first).batches is None
    assert not history.add(parse_scrape(later, 6.0))
    second = history.interval()
    assert second is not None
    assert set((figures_of(second).batches or {}).values()) == {0.0}


def test_reads_what_the_prometheus_client_writes() -> None:
    registry = CollectorRegistry()
    counter = Counter("purefill_batches", "Batches.", ["reason"], registry=registry)
    counter.labels('odd "name"\\with\nlines').inc(2)
    Histogram("purefill_request_seconds", "Time.", buckets=(1, 2), registry=registry).observe(1.5)
    scrape = parse_scrape(generate_latest(registry).decode(), 0.0)
    assert scrape.by("purefill_batches_total", "reason") == {'odd "name"\\with\nlines': 2.0}
    empty = Scrape(at=-1.0, series={}, counters=frozenset())
    quantile = Interval(start=empty, end=scrape).quantile("purefill_request_seconds", 0.5)
    assert quantile == 1.5


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (number(None), UNKNOWN),
        (number(0.0), "0"),
        (number(0.125, " /s"), "0.12 /s"),
        (number(12.34), "12.3"),
        (number(12345.6), "12,346"),
        (duration(None), UNKNOWN),
        (duration(0.0000123), "12.3 µs"),
        (duration(0.0456), "45.6 ms"),
        (duration(3.5), "3.50 s"),
        (share(0.256), "25.6 %"),
    ],
)
def test_figures_as_text(text: str, value: str) -> None:
    assert text == value


@pytest.mark.parametrize("width", [46, 60, 95, 96, 200])
def test_fits_every_width(width: int) -> None:
    lines = drawn(figures_of(interval()), width, note="the service was started again").splitlines()
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for word in ("full", "timeout", "512x8", "decode-0", "prefill-0", "p99", "padding"):
        assert word in text
    assert ("waiting" in lines[3] and "full" in lines[3]) == (width >= 96), "two columns where they fit"


def test_draws_what_it_can_in_a_window_that_is_too_narrow() -> None:
    lines = drawn(figures_of(interval()), 20).splitlines()
    assert max(map(len, lines)) <= 20
    assert "full" in "\n".join(lines)


class _Metrics(BaseHTTPRequestHandler):
    """Answers as a service does whose keys, texts and paths are those of its server."""

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, _Server)
        allowed = self.headers.get("Authorization") == "Bearer secret" or not server.wants_key
        text = server.texts.pop(0) if len(server.texts) > 1 else server.texts[0]
        self.send_response(200 if allowed else 401)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    texts: list[str]
    wants_key = False


@contextmanager
def serving(*texts: str, wants_key: bool = False) -> Iterator[str]:
    with _Server(("127.0.0.1", 0), _Metrics) as server:
        server.texts, server.wants_key = list(texts), wants_key
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_shows_one_interval_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(BEFORE, AFTER) as url:
        assert main(["top", "--url", url, "--interval", "0.1"]) == 0
    text = capsys.readouterr().out
    assert url in text
    assert "full" in text
    assert "\x1b" not in text


def test_api_key_from_option_or_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(AFTER, wants_key=True) as url:
        arguments = ["top", "--once", "--interval", "0.1", "--url", url]
        assert main(arguments) == 1
        assert "wants an API key: give it with --api-key" in capsys.readouterr().err
        assert main([*arguments, "--api-key", "secret"]) == 0
        monkeypatch.setenv("PUREFILL_API_KEYS", "secret,other")
        assert main(arguments) == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--url", "http://127.0.0.1:9"], 1, "no service answers at http://127.0.0.1:9/metrics"),
        (["--url", "127.0.0.1:8000"], 2, "url must begin with http:// or https://, got 127.0.0.1:8000"),
        (["--interval", "0"], 2, "interval must be >= 0.1 and <= 3600, got 0"),
        (["--interval", "nan"], 2, "interval must be >= 0.1 and <= 3600, got nan"),
        (["--onse"], 2, "unknown option --onse; did you mean --once?"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", *arguments]) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


@pytest.mark.parametrize("text", ["<html>hello</html>", "up 1\n", ""])
def test_another_service_is_told_from_ours(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(text) as url:
        assert main(["top", "--url", url]) == 1
    assert "metrics" in capsys.readouterr().err


def test_live_view_goes_on_through_an_outage_and_ends_with_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks once to begin with, meets an outage, finds the service started again, and gets Ctrl-C."""
    later = AFTER.replace("1700000000", "1700009999")
    looks: list[object] = [
        parse_scrape(BEFORE, 0.0),
        UnavailableError("no service answers"),
        parse_scrape(later, 4.0),
        KeyboardInterrupt(),
    ]

    def fetch(url: str, api_key: str | None) -> Scrape:
        look = looks.pop(0)
        if isinstance(look, BaseException):
            raise look
        assert isinstance(look, Scrape)
        return look

    monkeypatch.setattr("scheduler.top.command.fetch_scrape", fetch)
    console = Console(file=io.StringIO(), width=80, height=60, force_terminal=True)
    options = TopOptions(url="http://here", api_key=None, interval_s=0.1, once=False)
    assert run_top(options, console) == 0
    assert looks == []
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "no service answers; asking again every 0.1 s" in shown
    assert "the service was started again" in shown
    assert shown.endswith("\x1b[?25h\x1b[?1049l"), "the terminal is as it was"


def test_infinite_and_missing_values_do_no_harm() -> None:
    text = AFTER + "purefill_odd NaN\npurefill_odder +Inf\n"
    scrape = parse_scrape(text, 0.0)
    assert math.isnan(scrape.value("purefill_odd") or 0.0)
