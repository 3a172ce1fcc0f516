"""A service whose workers are groups of two ranks: the tokens of one process, and nothing lost when a rank dies."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.integration.test_load import check_nothing_is_left
from tests.support.chaos import Asked, Load, pids_of
from tests.support.random_llama import save_random_llama
from tests.support.service import Service, serve

MAX_TOKENS = 24
NUM_CLIENTS = 4
TIMEOUT_S = 240


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_random_llama(folder)
    return folder


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    options = {
        "model": folder,
        "dtype": "float32",
        "tensor-parallel-size": 2,
        "kv-memory": "4MiB",
        "max-num-seqs": 8,
        "batch-timeout-ms": 5,
        "max-capture-tokens": 32,
        "max-model-len": 128,
    }
    with serve(*(f"--{name}={value}" for name, value in options.items())) as running:
        assert any("1 PrefillWorker of 2 ranks, 1 DecodeWorker of 2 ranks" in line for line in running.log)
        yield running


@pytest.fixture(scope="module")
def asked(folder: Path, service: Service) -> list[Asked]:
    """Greedy requests, with what transformers' generate makes of them; the longest are cut into chunks."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chooser = random.Random(12)
    found = []
    for length in (3, 20, 40, 70):
        prompt = [chooser.randrange(3, 512) for _ in range(length)]
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False
            )
        body = {
            "model": service.model,
            "prompt": prompt,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        found.append(Asked(body=body, token_ids=made[0, length:].tolist()))
    return found


def test_the_death_of_ranks_is_a_pause_and_no_more(service: Service, asked: list[Asked]) -> None:
    async def run() -> Load:
        load = Load(service, asked)
        running = asyncio.create_task(load.run(NUM_CLIENTS))
        await load.wait_for(2 * NUM_CLIENTS)
        followers = pids_of(service, "follower")
        assert len(followers) == 2
        for pid in followers:
            os.kill(pid, signal.SIGKILL)
        await load.wait_for(2 * NUM_CLIENTS)
        load.is_over = True
        await running
        return load

    load = asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))

    assert load.wrong == []
    for worker in ("prefill-0", "decode-0"):
        assert service.metric("purefill_worker_restarts_total", worker=worker) == 1
    check_nothing_is_left(service)
