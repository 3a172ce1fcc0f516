"""A scheduler that starts again takes the workers over, whatever stands in its way."""

from __future__ import annotations

import asyncio

import pytest
from ray.exceptions import GetTimeoutError

from scheduler import crew as crew_module
from scheduler.actors import Actors
from scheduler.crew import Crew
from scheduler.fleet import Fleet
from scheduler.metrics import SchedulerMetrics
from tests.unit.scheduler.test_core_machine import Ends, make_core


def test_a_ray_that_does_not_answer_at_once_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [GetTimeoutError("GCS is busy"), RuntimeError("GCS is away")]

    async def running_workers() -> list[str]:
        if failures:
            raise failures.pop()
        return []

    async def scenario() -> None:
        actors = Actors()
        crew = Crew(
            make_core(Ends()),
            Fleet(None),
            actors,
            SchedulerMetrics(),
            life=1,
            watchdog_timeout_s=3600,
            pump=lambda: None,
        )
        await crew.until_open()
        assert not failures
        actors.cancel_all()

    monkeypatch.setattr(crew_module, "running_workers", running_workers)
    asyncio.run(asyncio.wait_for(scenario(), 10))
