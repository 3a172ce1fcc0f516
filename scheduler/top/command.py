"""The command `purefill top`: scrapes the service again and again, and shows what it does."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException

from rich.console import Console
from rich.live import Live

from scheduler.errors import AuthenticationError, ConfigError, UnavailableError
from scheduler.top.exposition import History, Scrape, parse_scrape
from scheduler.top.figures import Figures, figures_of
from scheduler.top.screen import Screen

_SPAN_S = 10.0
"""What is shown are the last seconds: long enough that single batches do not make rates jump."""
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TopOptions:
    """What is watched, and how."""

    url: str
    """Of the service, such as ``http://127.0.0.1:8000``; its metrics are below it."""
    api_key: str | None
    interval_s: float
    """Time between two scrapes."""
    once: bool
    """Show one interval and end, also in a terminal."""

    def __post_init__(self) -> None:
        """Check the values. Raises ConfigError."""
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"url must begin with http:// or https://, got {self.url}")
        if not 0.1 <= self.interval_s <= 3600:
            raise ConfigError(f"interval must be >= 0.1 and <= 3600, got {self.interval_s:g}")


def run_top(options: TopOptions, console: Console | None = None) -> int:
    """Show the service until Ctrl-C; where there is no terminal, once. Returns the exit code.

    Raises UnavailableError if there is no service to begin with, AuthenticationError if it wants an API key.
    """
    console = console or Console()
    watch = _Watch(options)
    watch.scrape()
    try:
        if options.once or not console.is_terminal:
            time.sleep(options.interval_s)
            watch.scrape()
            console.print(watch.screen())
        else:
            _show_live(options, watch, console)
    except KeyboardInterrupt:
        pass  # The way to end it.
    return 0


def _show_live(options: TopOptions, watch: _Watch, console: Console) -> None:
    # Refreshed more often than scraped, so that it follows the size of the terminal.
    with Live(console=console, screen=True, get_renderable=watch.screen, refresh_per_second=4) as live:
        while True:
            time.sleep(options.interval_s)
            try:
                watch.scrape()
            except UnavailableError as error:
                watch.note = f"{error}; asking again every {options.interval_s:g} s"
            live.refresh()


class _Watch:
    """Owns what was scraped so far."""

    def __init__(self, options: TopOptions) -> None:
        self._options = options
        self._history = History(_SPAN_S)
        self._figures: Figures | None = None
        self.note = ""

    def scrape(self) -> None:
        """Ask the service once. Raises UnavailableError and AuthenticationError."""
        began_anew = self._history.add(fetch_scrape(self._options.url, self._options.api_key))
        interval = self._history.interval()
        self._figures = None if interval is None else figures_of(interval)
        self.note = "the service was started again: rates begin anew" if began_anew else ""

    def screen(self) -> Screen:
        """Return what is to be shown now."""
        return Screen(
            title=self._options.url,
            clock=time.strftime("%H:%M:%S"),
            figures=self._figures,
            note=self.note,
        )


def fetch_scrape(url: str, api_key: str | None) -> Scrape:
    """Return the metrics of the service at `url`, as of now.

    Raises UnavailableError if it does not answer, or does not answer with metrics, and AuthenticationError.
    """
    address = url.rstrip("/") + "/metrics"
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        request = urllib.request.Request(address, headers=headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            text = answer.read().decode(errors="replace")
        scrape = parse_scrape(text, time.monotonic())
    except urllib.error.HTTPError as error:
        with error:
            if error.code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                raise AuthenticationError(f"{address} wants an API key: give it with --api-key") from error
            hint = "; with --metrics-port they are at that port" if error.code == HTTPStatus.NOT_FOUND else ""
            raise UnavailableError(f"{address} answers with status {error.code}{hint}") from error
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise UnavailableError(f"no service answers at {address}: {_words(reason)}") from error
    except ValueError as error:
        raise UnavailableError(f"{address} does not answer with metrics: {error}") from error
    if not any(name.startswith("purefill_") for name in scrape.series):
        raise UnavailableError(f"{address} answers, but not with the metrics of purefill")
    return scrape


def _words(reason: object) -> str:
    """Return what went wrong, in one line."""
    text = reason.strerror if isinstance(reason, OSError) and reason.strerror else str(reason)
    return " ".join(str(text).split()) or type(reason).__name__
