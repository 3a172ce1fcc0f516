"""Many requests at once: all are answered, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx

from tests.support.service import Service


def check_nothing_is_left(service: Service) -> None:
    """Every page is free, no lease is left, no request lives.

    A client may have its last token a moment before the scheduler has the report of that step.
    """
    for _ in range(500):
        if service.metric("purefill_live_requests") == 0 and service.metric("purefill_kv_leases") == 0:
            break
    assert service.metric("purefill_kv_pages", state="used") == 0
    assert service.metric("purefill_kv_pages", state="free") > 0
    assert service.metric("purefill_kv_leases") == 0
    assert service.metric("purefill_live_requests") == 0
    assert service.metric("purefill_queue_requests") == 0
    assert service.metric("purefill_queue_tokens") == 0


def test_64_requests_of_random_length_at_once(service: Service) -> None:
    chooser = random.Random(64)

    def body() -> dict[str, Any]:
        return {
            "model": service.model,
            "prompt": [chooser.randrange(3, 49152) for _ in range(chooser.randint(1, 400))],
            "max_tokens": chooser.randint(1, 24),
            "ignore_eos": True,
        }

    async def run(bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=service.url, timeout=300, limits=limits) as client:
            answers = await asyncio.gather(*(client.post("/v1/completions", json=b) for b in bodies))
            return [answer.raise_for_status().json() for answer in answers]

    bodies = [body() for _ in range(64)]
    for sent, answer in zip(bodies, asyncio.run(run(bodies)), strict=True):
        assert answer["usage"]["prompt_tokens"] == len(sent["prompt"])
        assert answer["usage"]["completion_tokens"] == sent["max_tokens"]
        assert answer["choices"][0]["finish_reason"] == "length"
    check_nothing_is_left(service)


def test_clients_that_leave_give_their_pages_back(service: Service) -> None:
    """A stream that is closed after its first chunk is cancelled; the next request does not notice."""

    async def leave(client: httpx.AsyncClient) -> None:
        body = {"model": service.model, "prompt": "Count: 1 2 3", "max_tokens": 2000, "stream": True}
        async with client.stream("POST", "/v1/completions", json={**body, "ignore_eos": True}) as response:
            async for _ in response.aiter_lines():
                return

    async def run() -> None:
        async with httpx.AsyncClient(base_url=service.url, timeout=300) as client:
            await asyncio.gather(*(leave(client) for _ in range(8)))
            answer = await client.post(
                "/v1/completions", json={"model": service.model, "prompt": "Hello", "max_tokens": 3}
            )
            answer.raise_for_status()

    cancelled = service.metric("purefill_requests_total", outcome="cancelled")
    asyncio.run(run())
    check_nothing_is_left(service)
    assert service.metric("purefill_requests_total", outcome="cancelled") - cancelled == 8
