from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from scheduler.api.tokenizer import Tokenizer
from scheduler.errors import UnavailableError
from scheduler.top.exposition import Interval, parse_scrape
from scheduler.top.figures import figures_of
from tests.support.browser import chromium, served, watched_page
from tests.support.exposition import AFTER, BEFORE
from tests.unit.scheduler.api.scripted import ScriptedEngine, app_over


class _Measured(ScriptedEngine):
    """Has the metrics of `scrapes`, one after the other, then the last one again and again."""

    def __init__(self, *scrapes: str, texts: list[str] | None = None) -> None:
        super().__init__(texts)
        self.scrapes = list(scrapes)

    async def metrics(self) -> str:
        await super().metrics()
        return self.scrapes.pop(0) if len(self.scrapes) > 1 else self.scrapes[0]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


def test_page_computes_what_the_terminal_does(browser: Browser) -> None:
    script = """async ([before, after]) => {
        const { figuresOf, History, parseScrape } = await import("/ui/figures.js");
        const history = new History(10);
        history.add(parseScrape(before, 100));
        const figures = [figuresOf(history.interval())];
        const restarted = history.add(parseScrape(after, 110));
        return [...figures, figuresOf(history.interval()), restarted];
    }"""
    with served(app_over(_Measured(AFTER), None)) as url, watched_page(browser, url) as page:
        only, both, restarted = page.evaluate(script, [BEFORE, AFTER])
        _, anew, is_restarted = page.evaluate(script, [AFTER, BEFORE])
    before, after = parse_scrape(BEFORE, 100.0), parse_scrape(AFTER, 110.0)
    assert only == _as_page(Interval(start=before, end=before))
    assert both == _as_page(Interval(start=before, end=after))
    assert anew == _as_page(Interval(start=before, end=before)) | {"seconds": 0}
    assert (restarted, is_restarted) == (False, True)


def _as_page(interval: Interval) -> Any:
    """Return the figures as the page names them, with what is exact to the last digit in both."""

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key if " " in key else _camel(key): renamed(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [renamed(item) for item in value]
        return pytest.approx(value) if isinstance(value, float) else value

    return renamed(asdict(figures_of(interval)))


def _camel(name: str) -> str:
    return re.sub(r"_(\w)", lambda match: match[1].upper(), name) if name != "too_long" else name


def test_key_is_asked_for_and_kept_for_the_session(browser: Browser, bytes_tokenizer: Tokenizer) -> None:
    engine = _Measured(BEFORE, AFTER, texts=["well<end>"] * 2)
    with served(app_over(engine, bytes_tokenizer, api_keys=("secret",))) as url:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{url}/ui")
        _fill(page)
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#outcome")).to_have_text(re.compile("an API key is needed"))
        page.get_by_label("API key").fill("secret")
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#answer")).to_have_text("well")
        page.reload()
        _fill(page)
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#answer")).to_have_text("well")
        stored = page.evaluate("[JSON.stringify(localStorage), document.cookie]")
        context.close()
    assert stored == ["{}", ""]


def test_works_by_keyboard_alone(browser: Browser, bytes_tokenizer: Tokenizer) -> None:
    engine = _Measured(AFTER, texts=["by keys<end>"])
    with served(app_over(engine, bytes_tokenizer)) as url, watched_page(browser, url, "dark") as page:
        page.keyboard.press("Tab")
        reached = []
        for _ in range(7):
            reached.append(page.evaluate("document.activeElement.id"))
            if reached[-1] == "prompt":
                page.keyboard.press("Control+A")
                page.keyboard.type("Hi")
            elif reached[-1] == "max-tokens":
                page.keyboard.press("Control+A")
                page.keyboard.type("8")
            page.keyboard.press("Tab")
        assert reached[:6] == ["key", "prompt", "kind", "max-tokens", "temperature", "send"]
        page.get_by_role("textbox", name="Prompt").focus()
        page.keyboard.press("Control+Enter")
        expect(page.locator("#answer")).to_have_text("by keys")
        expect(page.locator("#timeline")).to_be_visible()


def test_errors_and_stopping_are_told(browser: Browser, bytes_tokenizer: Tokenizer) -> None:
    engine = _Measured(AFTER, texts=None)
    with served(app_over(engine, bytes_tokenizer)) as url:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{url}/ui")
        _fill(page, max_tokens="500")
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#outcome")).to_have_text(re.compile("max_tokens must be <= "))
        _fill(page)
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#outcome")).to_have_text("sent")
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("#outcome")).to_have_text("stopped")
        engine.failure = UnavailableError("the scheduler is not running")
        expect(page.locator("#state")).to_have_text("the scheduler is not running")
        engine.failure = None
        expect(page.locator("#state")).to_have_text("answers")
        context.close()


def test_shows_what_the_metrics_say_and_a_dash_for_what_they_do_not(browser: Browser) -> None:
    bare = "# TYPE purefill_queue_requests gauge\npurefill_queue_requests 3\n"
    with served(app_over(_Measured(bare), None)) as url, watched_page(browser, url) as page:
        expect(page.locator("#requests")).to_contain_text("3 (– tokens)")  # noqa: RUF001
        expect(page.locator("#times tbody tr").first).to_have_text("first token–––")  # noqa: RUF001
    with served(app_over(_Measured(BEFORE, AFTER), None)) as url, watched_page(browser, url) as page:
        expect(page.locator("#replays")).to_contain_text("512x8")
        expect(page.locator("#workers")).to_contain_text("prefill-0")
        expect(page.locator("#pages")).to_contain_text("decode-0")
        # With the second scrape there are rates, and a line.
        expect(page.locator("#plots figure").nth(1)).to_contain_text("full")
        expect(page.get_by_role("img", name="Waiting, now: requests 5")).to_be_visible()


def _fill(page: Page, max_tokens: str = "8") -> None:
    page.get_by_role("textbox", name="Prompt").fill("Hi")
    page.get_by_label("Most tokens").fill(max_tokens)
