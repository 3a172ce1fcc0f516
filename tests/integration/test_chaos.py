"""Each part is killed, or stopped for long, under steady load: every request is answered once, with its tokens."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator

import pytest

from tests.integration.test_load import check_nothing_is_left
from tests.support.chaos import Load, ask_undisturbed, kill, pid_of
from tests.support.service import Service, serve

NUM_CLIENTS = 6
MAX_TOKENS = 16


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    options = (
        "--dtype=float32",
        "--kv-memory=256MiB",
        "--max-capture-tokens=64",
        "--watchdog-timeout-s=8",
    )
    with serve(*options) as running:
        yield running


def test_the_death_of_any_part_is_a_pause_and_no_more(service: Service) -> None:
    chooser = random.Random(6)
    prompts = [[chooser.randrange(3, 49152) for _ in range(chooser.randint(2, 30))] for _ in range(8)]

    async def run() -> Load:
        asked = await ask_undisturbed(service, prompts, MAX_TOKENS)
        load = Load(service, asked)
        running = asyncio.create_task(load.run(NUM_CLIENTS))
        for part in ("prefill", "decode", "scheduler"):
            await load.wait_for(NUM_CLIENTS)
            kill(service, part)
            # Those that were under way, and as many that came after.
            await load.wait_for(2 * NUM_CLIENTS)
        hung = pid_of(service, "decode")
        assert hung is not None
        os.kill(hung, signal.SIGSTOP)
        await load.wait_for(2 * NUM_CLIENTS)
        load.is_over = True
        await running
        return load

    load = asyncio.run(asyncio.wait_for(run(), 300))
    assert load.wrong == []
    check_nothing_is_left(service)
    assert service.metric("purefill_requests_total", outcome="worker_failed") == 0
    # Those that died before the scheduler are in the counts of the scheduler before it.
    assert service.metric("purefill_worker_restarts_total", worker="decode-0") == 1
    assert service.metric("purefill_requeues_total", reason="worker_lost") > 0
