"""A full queue, deletion and the adaptive policy, on a real service."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.integration.test_load import check_nothing_is_left
from tests.support.service import Service, serve

MAX_QUEUED = 4


@pytest.fixture(scope="module")
def narrow() -> Iterator[Service]:
    """A queue that holds fewer than make a batch, so that all of it waits for the timeout."""
    limits = ("--max-queued-requests", str(MAX_QUEUED), "--batch-timeout-ms", "10000")
    with serve(*limits, "--max-capture-tokens", "64") as running:
        yield running


def body(service: Service, **fields: Any) -> dict[str, Any]:
    return {"model": service.model, "prompt": "Once upon", "max_tokens": 3, **fields}


def wait_for_queue(service: Service, num_requests: int) -> None:
    """Look at the queue until so many wait; each look asks the scheduler."""
    for _ in range(1000):
        if service.metric("purefill_queue_requests") == num_requests:
            return
    raise AssertionError(f"{num_requests} requests never waited")


def test_a_full_queue_answers_429_and_deletion_makes_room(narrow: Service) -> None:
    async def run() -> None:
        async with httpx.AsyncClient(base_url=narrow.url, timeout=120) as client:

            def post(**fields: Any) -> asyncio.Task[httpx.Response]:
                return asyncio.create_task(client.post("/v1/completions", json=body(narrow, **fields)))

            held = [post() for _ in range(MAX_QUEUED - 1)]
            streamed = asyncio.create_task(first_error(client, narrow))
            await asyncio.to_thread(wait_for_queue, narrow, MAX_QUEUED)

            refused = await post()
            assert refused.status_code == 429
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert int(refused.headers["retry-after"]) >= 1
            too_many = await post(prompt=["a"] * (MAX_QUEUED + 1))
            assert too_many.status_code in (400, 429)

            assert (await client.delete("/v1/requests/victim")).status_code == 200
            assert (await client.delete("/v1/requests/victim")).status_code == 404
            assert "request_cancelled" in await streamed
            await asyncio.to_thread(wait_for_queue, narrow, MAX_QUEUED - 1)
            answers = await asyncio.gather(*held, post())
            assert [answer.status_code for answer in answers] == [200] * MAX_QUEUED

    asyncio.run(run())
    check_nothing_is_left(narrow)
    assert narrow.metric("purefill_rejections_total", reason="overloaded") >= 1


async def first_error(client: httpx.AsyncClient, service: Service) -> str:
    return (await client.post("/v1/completions", json=body(service, stream=True, request_id="victim"))).text


def test_the_adaptive_policy_serves_lone_prompts_and_bursts() -> None:
    with serve("--batch-policy", "adaptive", "--max-capture-tokens", "64") as service:

        async def run() -> None:
            async with httpx.AsyncClient(base_url=service.url, timeout=120) as client:
                for _ in range(5):
                    (await client.post("/v1/completions", json=body(service))).raise_for_status()
                # Without others to wait for, a lone prompt is not held.
                assert await asyncio.to_thread(service.metric, "purefill_batches_total", reason="idle") == 5
                burst = [
                    client.post("/v1/completions", json=body(service, priority=i % 2)) for i in range(24)
                ]
                for answer in await asyncio.gather(*burst):
                    assert answer.raise_for_status().json()["usage"]["completion_tokens"] <= 3

        asyncio.run(run())
        check_nothing_is_left(service)
        assert service.metric("purefill_prefill_batch_requests_sum") == 29
        # A burst shares batches.
        assert service.metric("purefill_batches_total") < 29
