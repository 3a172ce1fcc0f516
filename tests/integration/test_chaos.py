"""Each part is killed, or stopped for long, under load, and in the end all of them: nothing accepted is lost."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from tests.integration.test_load import check_nothing_is_left
from tests.support.chaos import Asked, Load, ask_undisturbed, send_signal
from tests.support.redis_server import RedisServer, running_redis
from tests.support.service import Service, serve

NUM_CLIENTS = 6
NUM_LASTING = 100
MAX_TOKENS = 16
TIMEOUT_S = 240


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    folder: Path = tmp_path_factory.mktemp("redis")
    with running_redis(folder, "--appendonly", "yes", "--requirepass", "secret") as server:
        server.url = server.url.replace("redis://", "redis://:secret@")
        yield server


@pytest.fixture(scope="module")
def options(redis_server: RedisServer) -> tuple[str, ...]:
    return (
        "--dtype=float32",
        "--kv-memory=256MiB",
        "--max-capture-tokens=32",
        "--max-num-seqs=32",
        "--api-servers=2",
        f"--journal={redis_server.url}",
    )


@pytest.fixture(scope="module")
def service(options: tuple[str, ...]) -> Iterator[Service]:
    with serve(*options) as running:
        yield running


@pytest.fixture(scope="module")
def asked(service: Service) -> list[Asked]:
    chooser = random.Random(6)
    prompts = [[chooser.randrange(3, 49152) for _ in range(chooser.randint(2, 30))] for _ in range(8)]
    return asyncio.run(ask_undisturbed(service, prompts, MAX_TOKENS))


def ready(service: Service) -> httpx.Response:
    return httpx.get(f"{service.url}/ready", timeout=TIMEOUT_S)


def wait_until_ready(service: Service) -> None:
    """Return once both ApiServers, to which connections go at random, were seen ready."""
    num_in_a_row = 0
    while num_in_a_row < 10:
        num_in_a_row = num_in_a_row + 1 if ready(service).status_code == 200 else 0


def wait_until_the_journal_has_no_work(redis_server: RedisServer) -> None:
    """What a dead ApiServer had not marked as complete, another takes over."""
    with redis.Redis.from_url(redis_server.url) as client:
        while list(client.scan_iter("purefill:*:open:*")):
            pass


async def redis_goes_and_comes(service: Service, redis_server: RedisServer) -> None:
    """Without Redis readiness says why, and nothing new is accepted."""
    await asyncio.to_thread(redis_server.stop, signal.SIGKILL)
    while (answer := await asyncio.to_thread(ready, service)).status_code == 200:
        pass
    assert "journal" in answer.json()["error"]["message"]
    assert (await asyncio.to_thread(httpx.get, f"{service.url}/health")).status_code == 200
    await asyncio.to_thread(redis_server.start)


async def a_worker_pauses(service: Service) -> None:
    """It is stopped until requests wait for it, and goes on."""
    pid = send_signal(service, "prefill", signal.SIGSTOP)
    while await asyncio.to_thread(service.metric, "purefill_live_requests") < NUM_CLIENTS:
        pass
    os.kill(pid, signal.SIGCONT)


def test_the_death_of_any_part_is_a_pause_and_no_more(
    service: Service, redis_server: RedisServer, asked: list[Asked]
) -> None:
    parts = ["prefill", "decode", "scheduler", "api", "redis", "pause"]
    random.Random(2).shuffle(parts)

    async def run() -> Load:
        load = Load(service, asked)
        running = asyncio.create_task(load.run(NUM_CLIENTS))
        for part in parts:
            await load.wait_for(NUM_CLIENTS + 1)  # Each client may have had an answer on its way.
            if part == "redis":
                await redis_goes_and_comes(service, redis_server)
            elif part == "pause":
                await a_worker_pauses(service)
            else:
                send_signal(service, part)
        await load.wait_for(2 * NUM_CLIENTS)
        load.is_over = True
        await running
        return load

    load = asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))
    assert load.wrong == []
    assert load.num_sent_again > 0
    wait_until_ready(service)
    assert ready(service).json() == {"journal": "up"}
    wait_until_the_journal_has_no_work(redis_server)
    check_nothing_is_left(service)
    assert service.metric("purefill_requests_total", outcome="worker_failed") == 0


class Results:
    """What came of many requests so far."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(NUM_LASTING)]
        self.is_midway = asyncio.Event()

    def add(self, i: int, token_ids: list[int]) -> None:
        self.tokens[i] += token_ids
        if sum(map(len, self.tokens)) > NUM_LASTING * MAX_TOKENS / 4:
            self.is_midway.set()


def body_of(i: int, asked: list[Asked]) -> dict[str, Any]:
    """Two thirds are asked for with known results, a third is drawn without a seed; half of all are streams."""
    body = {**asked[i % len(asked)].body, "stream": i % 2 == 0}
    return {**body, "temperature": 1.0, "seed": None} if i % 3 == 2 else body


async def ask(client: httpx.AsyncClient, i: int, asked: list[Asked], results: Results) -> None:
    """Send request i and note its tokens, or those that came before the connection broke."""
    headers = {"Idempotency-Key": f"lasting-{i}"}
    try:
        async with client.stream(
            "POST", "/v1/completions", json=body_of(i, asked), headers=headers
        ) as answer:
            assert answer.status_code == 200, (await answer.aread()).decode()
            if i % 2:
                results.add(i, json.loads(await answer.aread())["choices"][0]["token_ids"])
                return
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    results.add(i, json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"])
    except httpx.TransportError:
        pass  # The service is gone.


async def ask_all(service: Service, asked: list[Asked], results: Results) -> list[list[int]]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=service.url, timeout=TIMEOUT_S, limits=limits) as client:
        await asyncio.gather(*(ask(client, i, asked, results) for i in range(NUM_LASTING)))
    return results.tokens


async def ask_and_kill(service: Service, asked: list[Asked]) -> list[list[int]]:
    """Send all requests, and kill every process of the service in the middle of them."""
    results = Results()
    asking = asyncio.ensure_future(ask_all(service, asked, results))
    await asyncio.wait_for(results.is_midway.wait(), TIMEOUT_S)
    for pid in service.processes():
        os.kill(pid, signal.SIGKILL)
    return await asking


def test_the_death_of_everything_loses_no_accepted_request(
    service: Service, options: tuple[str, ...], redis_server: RedisServer, asked: list[Asked]
) -> None:
    seen = asyncio.run(ask_and_kill(service, asked))
    service.process.wait(60)
    log = "".join(service.log)
    assert sum(map(len, seen)) < NUM_LASTING * MAX_TOKENS, "it had finished before it was killed"
    with serve(*options) as again:
        results = asyncio.run(ask_all(again, asked, Results()))
        for i, (before, after) in enumerate(zip(seen, results, strict=True)):
            # Streams start from the first token: what was seen before the end is their beginning.
            assert len(after) == MAX_TOKENS
            assert after[: len(before)] == before
            if i % 3 != 2:
                assert after == asked[i % len(asked)].token_ids, f"request {i}"
        # Computed once: the same keys give the same, also of what was drawn without a seed.
        num_tokens = again.metric("purefill_output_tokens_total")
        assert asyncio.run(ask_all(again, asked, Results())) == results
        assert again.metric("purefill_output_tokens_total") == num_tokens
        assert num_tokens < NUM_LASTING * MAX_TOKENS, "what had been computed was computed again"
        wait_until_the_journal_has_no_work(redis_server)
        check_nothing_is_left(again)
        log += "".join(again.log)
    assert "secret" not in log
