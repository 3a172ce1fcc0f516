"""Steady load on a service whose processes are killed, and a check of every answer."""

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
}
"""How the processes of the actors begin their command lines."""


def pid_of(service: Service, part: str) -> int | None:
    """Return the process of a part of the service, or None while it starts."""
    for pid in service.processes():
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue  # It ended meanwhile.
        if title.startswith(RAY_TITLES[part]):
            return pid
    return None


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request, and the tokens that it must give."""

    body: dict[str, Any]
    token_ids: list[int]


@dataclass
class Load:
    """Sends requests without a pause until it is told to stop, and checks each answer."""

    service: Service
    asked: list[Asked]
    num_checked: int = 0
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
        while not self.is_over:
            asked = self.asked[number % len(self.asked)]
            number += 1
            answer = await (read_stream if number % 2 else read_whole)(client, asked.body)
            if answer != asked.token_ids:
                self.wrong.append(f"{asked.body}: {answer}, not {asked.token_ids}")
            async with self.finished:
                self.num_checked += 1
                self.finished.notify_all()


async def read_whole(client: httpx.AsyncClient, body: dict[str, Any]) -> list[int] | str:
    """Return the tokens of an answer, or what came instead."""
    answer = await client.post("/v1/completions", json=body)
    if answer.status_code != 200:
        return f"{answer.status_code} {answer.text}"
    token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return token_ids


async def read_stream(client: httpx.AsyncClient, body: dict[str, Any]) -> list[int] | str:
    """Return the tokens of a stream, or what came instead."""
    token_ids: list[int] = []
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                if "choices" not in chunk:
                    return f"{response.status_code} {line}"
                token_ids += chunk["choices"][0]["token_ids"]
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
        answers = await asyncio.gather(*(read_whole(client, body) for body in bodies))
    asked = []
    for body, answer in zip(bodies, answers, strict=True):
        assert isinstance(answer, list), answer
        asked.append(Asked(body=body, token_ids=answer))
    return asked


def kill(service: Service, part: str) -> None:
    """End a part's process as the kernel does that runs out of memory."""
    pid = pid_of(service, part)
    assert pid is not None, f"no process of {part}"
    os.kill(pid, signal.SIGKILL)
