"""Steady load on a service with a journal whose processes are killed, and a check of every answer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.support.service import Service

RAY_TITLES = {
    "prefill": "ray::PrefillWorker",
    "decode": "ray::DecodeWorker",
    "scheduler": "ray::Scheduler",
    "api": "ray::ApiServer",
    "follower": "ray::ShardFollower",
}
"""How the processes of the actors begin their command lines."""

_RETRY_S = 0.1
"""How long a client waits before it sends a request again."""


def pids_of(service: Service, part: str) -> list[int]:
    """Return the processes of this kind of part of the service; none while it starts."""
    found = []
    for pid in service.processes():
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue  # It ended meanwhile.
        if title.startswith(RAY_TITLES[part]):
            found.append(pid)
    return found


def send_signal(service: Service, part: str, number: signal.Signals = signal.SIGKILL) -> int:
    """Send a signal to a part's process, once it has one, and return its id.

    SIGKILL ends it as the kernel does without memory.
    """
    while not (pids := pids_of(service, part)):
        pass
    os.kill(pids[0], number)
    return pids[0]


class NotNowError(Exception):
    """The service cannot say yet what becomes of a request: it is to be asked again with the same key."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request, and the tokens that it must give."""

    body: dict[str, Any]
    token_ids: list[int]


@dataclass
class Load:
    """Sends requests without a pause until it is told to stop, and checks each answer.

    Each has a key of its own, with which it is sent again when its connection breaks or it is 503.
    """

    service: Service
    asked: list[Asked]
    num_checked: int = 0
    num_sent_again: int = 0
    wrong: list[str] = field(default_factory=list)
    finished: asyncio.Condition = field(default_factory=asyncio.Condition)
    is_over: bool = False

    async def run(self, num_clients: int) -> None:
        async with httpx.AsyncClient(base_url=self.service.url, timeout=300) as client:
            await asyncio.gather(*(self._send(client, i) for i in range(num_clients)))

    async def wait_for(self, num_more: int) -> None:
        """Return once so many more requests were answered."""
        goal = self.num_checked + num_more
        async with self.finished:
            await self.finished.wait_for(lambda: self.num_checked >= goal)

    async def _send(self, client: httpx.AsyncClient, number: int) -> None:
        for count in range(number, 1_000_000_000):
            if self.is_over:
                return
            asked = self.asked[count % len(self.asked)]
            answer = await self._ask(client, asked, f"load-{number}-{count}", streams=count % 2 == 0)
            if answer != asked.token_ids:
                self.wrong.append(f"{asked.body}: {answer}, not {asked.token_ids}")
            async with self.finished:
                self.num_checked += 1
                self.finished.notify_all()

    async def _ask(
        self, client: httpx.AsyncClient, asked: Asked, key: str, *, streams: bool
    ) -> list[int] | str:
        while True:
            try:
                if streams:
                    return await read_stream(client, asked.body, key, asked.token_ids)
                return await read_whole(client, asked.body, key)
            except (httpx.TransportError, NotNowError):
                self.num_sent_again += 1
                await asyncio.sleep(_RETRY_S)


async def read_whole(client: httpx.AsyncClient, body: dict[str, Any], key: str) -> list[int] | str:
    """Return the tokens of an answer, or what came instead. Raises NotNowError."""
    answer = await client.post("/v1/completions", json=body, headers={"Idempotency-Key": key})
    if answer.status_code == 503:
        raise NotNowError(answer.text)
    if answer.status_code != 200:
        return f"{answer.status_code} {answer.text}"
    token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return token_ids


async def read_stream(
    client: httpx.AsyncClient, body: dict[str, Any], key: str, expected: list[int]
) -> list[int] | str:
    """Return the tokens of a stream, or what came instead, as soon as they are not the expected ones.

    Raises NotNowError.
    """
    token_ids: list[int] = []
    headers = {"Idempotency-Key": key}
    async with client.stream(
        "POST", "/v1/completions", json={**body, "stream": True}, headers=headers
    ) as response:
        if response.status_code == 503:
            raise NotNowError
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                if chunk.get("error", {}).get("type") == "service_unavailable":
                    raise NotNowError
                if "choices" not in chunk:
                    return f"{response.status_code} {line}"
                token_ids += chunk["choices"][0]["token_ids"]
                if token_ids != expected[: len(token_ids)]:
                    break
    return token_ids if response.status_code == 200 else f"{response.status_code}"


async def ask_undisturbed(service: Service, prompts: list[list[int]], max_tokens: int) -> list[Asked]:
    """Return requests, greedy and seeded in turn, with the tokens that they give while nothing happens."""
    bodies = [
        {
            "model": service.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0 if i % 2 else 0.9,
            "seed": 11 + i,
            "ignore_eos": True,
            "return_token_ids": True,
            **({"logprobs": 1} if i % 4 == 0 else {}),
        }
        for i, prompt in enumerate(prompts)
    ]
    async with httpx.AsyncClient(base_url=service.url, timeout=300) as client:
        answers = await asyncio.gather(
            *(read_whole(client, body, f"undisturbed-{i}") for i, body in enumerate(bodies))
        )
    asked = []
    for body, answer in zip(bodies, answers, strict=True):
        assert isinstance(answer, list), answer
        asked.append(Asked(body=body, token_ids=answer))
    return asked
