"""Everything dies in the middle of many requests, and a service with the same journal finishes them all."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.redis_server import RedisServer, running_redis
from tests.support.service import Service, serve

_NUM_REQUESTS = 18
_NUM_TOKENS = 32
_TIMEOUT_S = 240


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    folder = tmp_path_factory.mktemp("redis")
    with running_redis(folder, "--appendonly", "yes", "--requirepass", "secret") as server:
        server.url = server.url.replace("redis://", "redis://:secret@")
        yield server


def body_of(i: int, model: str) -> dict[str, Any]:
    """A third greedy, a third drawn with a seed, a third drawn without; half of them as streams."""
    sampling: dict[str, Any] = {"temperature": 0} if i % 3 == 0 else {"temperature": 1.0, "top_p": 0.95}
    if i % 3 == 1:
        sampling["seed"] = i
    return {
        "model": model,
        "prompt": [1000 + i, 2000 + i, 3000 + i],
        "max_tokens": _NUM_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": i % 2 == 0,
        **sampling,
    }


class Asked:
    """What came of all requests so far."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(_NUM_REQUESTS)]
        self.is_midway = asyncio.Event()

    def add(self, i: int, tokens: list[int]) -> None:
        self.tokens[i] += tokens
        if sum(map(len, self.tokens)) > _NUM_REQUESTS * _NUM_TOKENS / 5:
            self.is_midway.set()


async def ask(client: httpx.AsyncClient, i: int, model: str, key: str | None, asked: Asked) -> None:
    """Send request i and note its tokens, or those that came before the connection broke."""
    headers = {} if key is None else {"Idempotency-Key": key}
    try:
        async with client.stream(
            "POST", "/v1/completions", json=body_of(i, model), headers=headers
        ) as answer:
            assert answer.status_code == 200, (await answer.aread()).decode()
            if i % 2:
                asked.add(i, json.loads(await answer.aread())["choices"][0]["token_ids"])
                return
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    asked.add(i, json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"])
    except httpx.TransportError:
        pass  # The service is gone.


async def ask_all(service: Service, prefix: str | None, asked: Asked) -> list[list[int]]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=service.url, timeout=_TIMEOUT_S, limits=limits) as client:
        keys = [None if prefix is None else f"{prefix}-{i}" for i in range(_NUM_REQUESTS)]
        await asyncio.gather(*(ask(client, i, service.model, key, asked) for i, key in enumerate(keys)))
    return asked.tokens


async def ask_and_kill(service: Service) -> list[list[int]]:
    """Send all requests, and kill every process of the service in the middle of their streams."""
    asked = Asked()
    asking = asyncio.ensure_future(ask_all(service, "k", asked))
    await asyncio.wait_for(asked.is_midway.wait(), _TIMEOUT_S)
    for pid in service.processes():
        os.kill(pid, signal.SIGKILL)
    return await asking


def results_of(service: Service, prefix: str | None) -> list[list[int]]:
    async def scenario() -> list[list[int]]:
        return await ask_all(service, prefix, Asked())

    return asyncio.run(scenario())


def test_a_restart_in_the_middle_loses_no_accepted_request(redis_server: RedisServer) -> None:
    options = ["--dtype", "float32", "--kv-memory", "256MiB", "--max-capture-tokens", "64"]
    options += ["--journal", redis_server.url, "--max-num-seqs", "32"]
    with serve(*options) as service:
        assert service.metric("purefill_journal_up") == 1
        seen = asyncio.run(ask_and_kill(service))
        service.process.wait(60)
    assert sum(map(len, seen)) < _NUM_REQUESTS * _NUM_TOKENS, "the service had finished before it was killed"
    with serve(*options) as service:
        assert httpx.get(f"{service.url}/ready").json() == {"journal": "up"}
        results = results_of(service, "k")
        # Streams start from the first token: what was seen before the end is their beginning.
        for before, after in zip(seen, results, strict=True):
            assert len(after) == _NUM_TOKENS
            assert after[: len(before)] == before
        # Computed once: the same keys give the same, also of what was drawn without a seed.
        num_tokens = service.metric("purefill_output_tokens_total")
        assert results_of(service, "k") == results
        assert service.metric("purefill_output_tokens_total") == num_tokens
        assert num_tokens < _NUM_REQUESTS * _NUM_TOKENS, "what had been computed was computed again"
        # Greedy and seeded requests give what they give in a run that nothing disturbs.
        undisturbed = results_of(service, None)
        for i in range(_NUM_REQUESTS):
            if i % 3 != 2:
                assert results[i] == undisturbed[i], f"request {i}"
        redis_goes_and_comes(service, redis_server)
        log = "".join(service.log)
    assert "secret" not in log
    assert "Traceback" not in log


def redis_goes_and_comes(service: Service, redis_server: RedisServer) -> None:
    """Without Redis new requests are refused at once, and readiness says why; with it they are served again."""
    body = {"model": service.model, "prompt": [1, 2], "max_tokens": 2}
    redis_server.stop(signal.SIGKILL)
    answer = httpx.post(f"{service.url}/v1/completions", json=body, timeout=_TIMEOUT_S)
    assert answer.status_code == 503, answer.text
    ready = httpx.get(f"{service.url}/ready", timeout=_TIMEOUT_S)
    assert (ready.status_code, "journal" in ready.json()["error"]["message"]) == (503, True)
    assert httpx.get(f"{service.url}/health", timeout=_TIMEOUT_S).status_code == 200
    redis_server.start()
    while httpx.get(f"{service.url}/ready", timeout=_TIMEOUT_S).status_code != 200:
        pass
    assert httpx.post(f"{service.url}/v1/completions", json=body, timeout=_TIMEOUT_S).status_code == 200
