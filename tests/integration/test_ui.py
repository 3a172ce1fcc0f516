from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
from playwright.sync_api import expect

from tests.support.browser import chromium, watched_page
from tests.support.service import Service

_QUESTION = "What is the capital of France?"


def test_page_tries_a_prompt_and_shows_the_load(service: Service) -> None:
    messages = [{"role": "user", "content": _QUESTION}]
    body = {"model": service.model, "messages": messages, "max_tokens": 24, "temperature": 0}
    url, asked = f"{service.url}/v1/chat/completions", body | {"return_timings": True}
    choice = httpx.post(url, json=asked, timeout=60).raise_for_status().json()["choices"][0]
    text, timings = choice["message"]["content"], choice["timings"]
    assert 0 < timings["prefill_s"] < timings["first_token_s"] < timings["total_s"]
    stages = ("queued_s", "held_s", "prefill_s", "handoff_s", "decode_s")
    assert sum(timings[stage] for stage in stages) <= timings["total_s"]
    with chromium() as browser, watched_page(browser, service.url) as page:
        expect(page.locator("#state")).to_have_text("answers")
        page.get_by_role("textbox", name="Prompt").fill(_QUESTION)
        page.get_by_label("Most tokens").fill("24")
        with _load(service):
            expect(page.locator("#plots")).to_contain_text("timeout")
            page.get_by_role("button", name="Send").click()
            expect(page.locator("#outcome")).to_have_text(re.compile("tokens in, .* out"))
            expect(page.locator("#answer")).to_have_text(text)
            # What the service was given while the page looked at it.
            expect(page.locator("#times tbody tr").first).to_have_text(re.compile(r"first token\d"))
            expect(page.locator("#batches")).to_contain_text("requests in each")
            expect(page.locator("#pages")).to_contain_text("decode-0")
        rows = page.locator("#timeline-table tbody tr")
        expect(rows).to_have_count(8)
        assert [row.split("\t")[0] for row in rows.all_inner_texts()] == [
            "queued", "held", "prefill", "handoff", "decode", "messages", "first token", "all",
        ]  # fmt: skip
        widths = [
            float(part.get_attribute("width") or 0) for part in page.locator("#timeline-bar rect").all()
        ]
        assert abs(sum(widths) - 1000) < 1


@contextmanager
def _load(service: Service) -> Iterator[None]:
    """Send completions, one after the other in each of two threads, until the block ends."""
    ended = threading.Event()
    body = {"model": service.model, "prompt": "One, two,", "max_tokens": 8, "temperature": 0}

    def ask() -> None:
        while not ended.is_set():
            httpx.post(f"{service.url}/v1/completions", json=body, timeout=60).raise_for_status()

    with ThreadPoolExecutor(2) as pool:
        clients = [pool.submit(ask) for _ in range(2)]
        try:
            yield
        finally:
            ended.set()
    for client in clients:
        client.result()
