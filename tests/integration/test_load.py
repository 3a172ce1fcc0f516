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


def test_200_clients_that_leave_at_random_moments(service: Service) -> None:
    """Before the first token, in the middle of a stream, while another waits for a whole answer: all the same.

    The next request does not notice, and every page is back.
    """
    chooser = random.Random(200)

    async def leave(client: httpx.AsyncClient, num_lines: int) -> None:
        body = {
            "model": service.model,
            "prompt": "Count: 1 2 3",
            "max_tokens": 200,
            "ignore_eos": True,
            "stream": num_lines > 0,
        }
        async with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            for _ in range(num_lines):
                await anext(lines)

    async def run() -> httpx.Response:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=service.url, timeout=300, limits=limits) as client:
            # Streams leave after some of their lines; the others once those have left.
            streams = [asyncio.create_task(leave(client, chooser.randint(1, 5))) for _ in range(160)]
            waiting = [asyncio.create_task(leave(client, 0)) for _ in range(40)]
            for task, other in zip(chooser.sample(streams, 40), waiting, strict=True):
                await asyncio.wait((task,))
                other.cancel()
            await asyncio.gather(*streams)
            await asyncio.gather(*waiting, return_exceptions=True)
            body = {"model": service.model, "prompt": "Hello", "max_tokens": 3}
            return await client.post("/v1/completions", json=body)

    cancelled = service.metric("purefill_requests_total", outcome="cancelled")
    assert asyncio.run(run()).status_code == 200
    check_nothing_is_left(service)
    assert 160 <= service.metric("purefill_requests_total", outcome="cancelled") - cancelled <= 200
