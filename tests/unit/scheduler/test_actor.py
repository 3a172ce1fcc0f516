"""The Scheduler actor in one process, between workers that answer as they are told."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from scheduler import actor as actor_module
from scheduler import fleet as fleet_module
from scheduler.actor import Scheduler, SchedulerConfig
from scheduler.actors import Actors
from scheduler.core import QueueLimits
from scheduler.messages import PrefillBatch, PrefillOutcome, PrefillResult, Request, SamplingParams
from tests.unit.scheduler.test_core_machine import decode_info, prefill_info

CONFIG = SchedulerConfig(
    batch_policy="fixed",
    max_batch_requests=1,
    batch_timeout_s=0.0,
    max_batch_tokens=None,
    queue_limits=QueueLimits(max_requests=8, max_tokens=100),
)


def computed(batch: PrefillBatch) -> PrefillResult:
    """Return the result of a batch whose pages are still on their way."""
    outcomes = [PrefillOutcome(request_id=item.request.request_id, token_id=1) for item in batch.items]
    return PrefillResult(
        batch_id=batch.batch_id,
        worker="prefill-0",
        outcomes=tuple(outcomes),
        num_tokens=1,
        padding_tokens=0,
        replays={},
        handoff_pending=True,
    )


def not_found(name: str) -> Any:
    """Look an actor up, as in a Ray that knows none of that name."""
    raise ValueError(name)


def test_a_worker_that_cannot_say_what_became_of_pages_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It lives, so it may still write into pages that are about to be given to others."""
    restarted: list[str] = []
    was_restarted = asyncio.Event()

    def restart(name: str) -> None:
        restarted.append(name)
        was_restarted.set()

    async def call(self: Actors, name: str, method: str, *args: Any) -> Any:
        if method == "prefill":
            return computed(args[0])
        assert method == "handed_off"
        raise RayTaskError("handed_off", "KeyError", KeyError(1))  # type: ignore[no-untyped-call]

    async def scenario() -> None:
        never = asyncio.get_running_loop().create_future()
        endless = SimpleNamespace(remote=lambda *args: never)
        monkeypatch.setattr(Actors, "handle", lambda self, name: SimpleNamespace(run=endless, live=endless))
        scheduler = Scheduler(CONFIG)
        await scheduler.start((decode_info("decode-0"),), (prefill_info("prefill-0"),))
        request = Request(
            request_id="r1",
            api_server="api-0",
            prompt_token_ids=(1, 2),
            sampling=SamplingParams(max_tokens=4),
        )
        reply = await scheduler.submit(((request,),))
        assert reply.rejections == (None,)
        await was_restarted.wait()
        await scheduler.stop()

    monkeypatch.setattr(Actors, "call", call)
    monkeypatch.setattr(Actors, "forget", lambda self, name: None)
    monkeypatch.setattr(fleet_module, "_actor", not_found)
    monkeypatch.setattr(actor_module, "restart", restart)
    monkeypatch.setattr(actor_module, "serve_actor", lambda *args: None)
    asyncio.run(asyncio.wait_for(scenario(), 10))
    assert restarted == ["prefill-0"]
