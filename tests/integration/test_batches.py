"""Which requests are prefilled together, seen through the metrics and the log of a real service."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.service import Service, serve

TIMEOUT_MS = 3000


@pytest.fixture(scope="module")
def patient() -> Iterator[Service]:
    """A service that holds prompts so long that requests of one test surely meet."""
    with serve("--batch-timeout-ms", str(TIMEOUT_MS)) as running:
        yield running


def send(service: Service, prompts: list[str]) -> list[dict[str, Any]]:
    """Send each prompt as a request of its own, all at once; return the answers."""

    async def run() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=service.url, timeout=120) as client:
            fields = {"model": service.model, "max_tokens": 4, "ignore_eos": True}
            bodies = [{**fields, "prompt": prompt} for prompt in prompts]
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
            return [answer.raise_for_status().json() for answer in answers]

    return asyncio.run(run())


def batches(service: Service) -> dict[str, float]:
    return {
        "full": service.metric("purefill_batches_total", reason="full"),
        "timeout": service.metric("purefill_batches_total", reason="timeout"),
        "requests": service.metric("purefill_prefill_batch_requests_sum"),
    }


def growth(service: Service, before: dict[str, float]) -> dict[str, float]:
    return {name: value - before[name] for name, value in batches(service).items()}


@pytest.mark.parametrize(
    ("num_prompts", "expected"),
    [
        (8, {"full": 1, "timeout": 0, "requests": 8}),
        (3, {"full": 0, "timeout": 1, "requests": 3}),
        (1, {"full": 0, "timeout": 1, "requests": 1}),
    ],
)
def test_prompts_that_wait_together_are_one_batch(
    num_prompts: int, expected: dict[str, float], patient: Service
) -> None:
    before, started = batches(patient), time.monotonic()
    answers = send(patient, [f"Prompt number {i} of the test" for i in range(num_prompts)])
    assert all(answer["usage"]["completion_tokens"] == 4 for answer in answers)
    assert growth(patient, before) == expected
    line = [line for line in patient.log if " batch " in line or "batch" in line.split(")")[-1]][-1]
    match = re.search(r"(\d+) requests, \d+ tokens, (full|timeout), oldest waited ([\d.]+) ms", line)
    assert match is not None, line
    assert int(match[1]) == num_prompts
    if expected["timeout"]:
        assert time.monotonic() - started >= TIMEOUT_MS / 1000


def test_two_full_batches_leave_as_two(patient: Service) -> None:
    before = batches(patient)
    send(patient, ["Once upon a time"] * 16)
    assert growth(patient, before) == {"full": 2, "timeout": 0, "requests": 16}
