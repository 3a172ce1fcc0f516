"""A real headless Chromium for tests, and an application served to it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn
from playwright.sync_api import Browser, Page, expect, sync_playwright
from starlette.types import ASGIApp

expect.set_options(timeout=60_000)

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run the Chromium of this machine, or Playwright's own; skip the test where there is none.

    Until the block ends, this thread cannot run an event loop of its own.
    """
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        path = own if Path(own).exists() else next(filter(None, map(shutil.which, _NAMES)), None)
        if path is None:
            pytest.skip(f"no browser is installed: none of {', '.join(_NAMES)}, nor Playwright's own")
        # As root it has no sandbox; tests open nothing but our own pages.
        arguments = [
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
        ]
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def watched_page(browser: Browser, url: str, color_scheme: str = "light") -> Iterator[Page]:
    """Open a page. At the end nothing may have gone wrong in it, nor been asked for from elsewhere."""
    context = browser.new_context(
        viewport={"width": 1280, "height": 1150},
        color_scheme="dark" if color_scheme == "dark" else "light",
    )
    page = context.new_page()
    page.set_default_timeout(60_000)
    troubles: list[str] = []
    foreign: list[str] = []
    page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("request", lambda made: foreign.append(made.url) if not made.url.startswith(url) else None)
    page.goto(f"{url}/ui")
    try:
        yield page
    finally:
        context.close()
    assert not troubles
    assert not foreign


@contextmanager
def served(app: ASGIApp) -> Iterator[str]:
    """Serve an application at a free port until the block ends."""
    config = uvicorn.Config(app, port=0, lifespan="off", ws="none", log_config=None, access_log=False)
    server = uvicorn.Server(config)
    socket = config.bind_socket()
    thread = threading.Thread(target=server.run, args=([socket],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        socket.close()
