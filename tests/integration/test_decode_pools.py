"""Two prefill and two decode workers with very few pages, whose KV travels by messages: nothing is lost."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.integration.test_load import check_nothing_is_left
from tests.support.random_llama import save_random_llama
from tests.support.service import Service, serve

MAX_TOKENS = 80
PAGE_BYTES = 8 + 32 * 512
"""32 tokens of the model below, in float32, and their epoch."""
Prompt = tuple[int, ...]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model so small that hundreds of requests cost seconds."""
    folder = tmp_path_factory.mktemp("model")
    save_random_llama(folder)
    return folder


@pytest.fixture(scope="module")
def references(folder: Path) -> dict[Prompt, list[int]]:
    """What transformers' generate makes of some prompts, greedy."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens: dict[Prompt, list[int]] = {}
    for length in (5, 17, 40):
        prompts = torch.randint(2, 512, (8, length))
        with torch.inference_mode():
            made = model.generate(
                prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=MAX_TOKENS, do_sample=False
            )
        for prompt, row in zip(prompts.tolist(), made[:, length:].tolist(), strict=True):
            tokens[tuple(prompt)] = row
    return tokens


@pytest.fixture(scope="module")
def crowded(folder: Path) -> Iterator[Service]:
    """Each decode worker runs up to 8 sequences of up to 4 pages, and has 20 pages for them."""
    options = {
        "model": folder,
        "dtype": "float32",
        "prefill-workers": 2,
        "decode-workers": 2,
        "kv-memory": 21 * PAGE_BYTES,
        "max-num-seqs": 8,
        "max-batch-requests": 4,
        "batch-timeout-ms": 5,
        "max-capture-tokens": 64,
        "max-model-len": 128,
        "handoff-transport": "gloo",
    }
    with serve(*(f"--{name}={value}" for name, value in options.items())) as running:
        assert any("by gloo" in line for line in running.log)
        yield running


def check_all_ends(service: Service) -> None:
    """Let requests end whose clients left before the server could notice; then nothing is left."""
    while service.metric("purefill_live_requests"):
        pass  # each look takes the service a moment; pytest's time limit ends a wait for ever
    check_nothing_is_left(service)


def body(service: Service, prompt: Prompt, max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {
        "model": service.model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }


def client_of(service: Service) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=service.url,
        timeout=240,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
    )


async def complete(client: httpx.AsyncClient, request: dict[str, Any]) -> list[int]:
    answer = (await client.post("/v1/completions", json=request)).raise_for_status().json()
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


async def leave_after(client: httpx.AsyncClient, request: dict[str, Any], num_chunks: int) -> list[int]:
    """Read so many chunks of a stream, close it, and return their tokens."""
    tokens: list[int] = []
    async with client.stream("POST", "/v1/completions", json={**request, "stream": True}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                tokens += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
                num_chunks -= 1
            if num_chunks == 0:
                break
    return tokens


def test_random_arrivals_preemptions_and_cancellations_change_no_token(
    crowded: Service, references: dict[Prompt, list[int]]
) -> None:
    chooser = random.Random(4)

    async def one(client: httpx.AsyncClient, prompt: Prompt, delay_s: float, num_chunks: int | None) -> None:
        await asyncio.sleep(delay_s)
        request = body(crowded, prompt, MAX_TOKENS)
        if num_chunks is None:
            assert await complete(client, request) == references[prompt]
        else:
            tokens = await leave_after(client, request, num_chunks)
            assert tokens == references[prompt][: len(tokens)]
            assert tokens

    async def run() -> None:
        async with client_of(crowded) as client:
            await asyncio.gather(
                *(
                    one(
                        client,
                        prompt,
                        chooser.uniform(0, 0.3),  # soon enough that both pools are crowded on any machine
                        chooser.randint(1, 40) if i % 4 == 0 else None,
                    )
                    for i, prompt in enumerate([*references] * 2)
                )
            )

    asyncio.run(run())
    check_all_ends(crowded)
    assert crowded.metric("purefill_preemptions_total") > 0
    assert crowded.metric("purefill_requeues_total", reason="preempted") > 0
    assert crowded.metric("purefill_handoff_bytes_total", transport="gloo") > 0
    assert crowded.metric("purefill_leases_refused_total") == 0
    assert crowded.metric("purefill_requests_total", outcome="cancelled") > 0


def test_an_abort_storm_harms_nobody_else(crowded: Service, references: dict[Prompt, list[int]]) -> None:
    """500 requests, half of them cancelled at random moments."""
    chooser = random.Random(500)
    prompts = list(references)
    ended = crowded.metric("purefill_requests_total")
    outcomes = {"right": 0, "left": 0}

    async def one(client: httpx.AsyncClient, patience_s: float | None) -> None:
        prompt, max_tokens = chooser.choice(prompts), chooser.randint(1, 24)
        try:
            tokens = await asyncio.wait_for(complete(client, body(crowded, prompt, max_tokens)), patience_s)
        except TimeoutError:
            outcomes["left"] += 1
        else:
            assert tokens == references[prompt][:max_tokens]
            outcomes["right"] += 1

    async def run() -> None:
        async with client_of(crowded) as client:
            patience = [chooser.uniform(0.01, 6.0) if i % 2 else None for i in range(500)]
            await asyncio.gather(*(one(client, patience_s) for patience_s in patience))

    asyncio.run(run())
    print(outcomes)
    assert outcomes["right"] >= 250
    assert outcomes["left"] > 0
    check_all_ends(crowded)
    # A client may have left before its request was accepted.
    assert outcomes["right"] <= crowded.metric("purefill_requests_total") - ended <= 500
    failed = [
        crowded.metric("purefill_requests_total", outcome=label)
        for label in ("worker_failed", "unavailable", "internal")
    ]
    assert failed == [0, 0, 0]


def call_scheduler(service: Service, *calls: tuple[str, dict[str, Any]]) -> list[Any]:
    """Call methods of the Scheduler actor from another process, one after the other."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.support.ray_call", service.gcs_address(), json.dumps(calls)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "RAY_AUTH_MODE": "token"},
    )
    assert ended.returncode == 0, ended.stderr
    answers: list[Any] = json.loads(ended.stdout.splitlines()[-1])
    return answers


def test_workers_join_and_leave_under_load(crowded: Service, references: dict[Prompt, list[int]]) -> None:
    async def run() -> list[Any]:
        async with client_of(crowded) as client:

            async def load(prompt: Prompt) -> None:
                while not changing.done():
                    assert await complete(client, body(crowded, prompt, MAX_TOKENS)) == references[prompt]

            changing = asyncio.ensure_future(
                asyncio.to_thread(
                    call_scheduler,
                    crowded,
                    ("add_worker", {"kind": "decode"}),
                    ("add_worker", {"kind": "prefill"}),
                    ("remove_worker", {"name": "decode-0", "timeout_s": 0.0}),
                    ("remove_worker", {"name": "prefill-0"}),
                    ("remove_worker", {"name": "decode-1"}),
                )
            )
            await asyncio.gather(*(load(prompt) for prompt in references))
            # Only the worker that joined is left.
            assert crowded.metric("purefill_kv_pages", worker="decode-2", state="free") > 0
            prompt = next(iter(references))
            assert await complete(client, body(crowded, prompt, MAX_TOKENS)) == references[prompt]
            return await changing

    assert asyncio.run(run()) == ["decode-2", "prefill-2", None, None, None]
    check_all_ends(crowded)
    assert crowded.metric("purefill_kv_pages", state="free") == 20
