"""Brings back what no part of the service itself brings back: ApiServers that died, and whatever hangs of the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_PAUSE_S = 1.0
"""Between two questions to one actor."""


@dataclass(slots=True, kw_only=True)
class _Part:
    name: str
    actor: Any
    must_start: bool = False
    """An ApiServer of which `start` is to be called in its new life."""
    call: Any = None
    """What it is asked at the moment."""
    asked_s: float = float("-inf")
    is_away: bool = False
    """As far as was said."""


class Supervisor:
    """Asks the scheduler and the ApiServers again and again whether they live. Ray starts their processes again.

    Belongs to the process that started the actors, which outlives them. Workers are the scheduler's.
    """

    def __init__(
        self, scheduler: Any, api_servers: Sequence[Any], *, hang_s: float, say: Callable[[str], None]
    ) -> None:
        """`hang_s`: a process that does not answer for so long is ended, so that it starts again.

        `say` is told in a line what happens.
        """
        self._hang_s = hang_s
        self._say = say
        self._scheduler = _Part(name="scheduler", actor=scheduler)
        self._api_servers = [_Part(name=f"api-{i}", actor=server) for i, server in enumerate(api_servers)]

    def look(self, now: float) -> None:
        """Take in the answers that came, and ask whoever was not asked for a second. Returns at once."""
        for part in (self._scheduler, *self._api_servers):
            if part.call is not None:
                self._take_answer(part, now)
            if part.call is None and now - part.asked_s >= _PAUSE_S:
                self._ask(part, now)

    def _ask(self, part: _Part, now: float) -> None:
        if part is self._scheduler:
            part.call = part.actor.load.remote()
        else:
            part.call = part.actor.start.remote() if part.must_start else part.actor.is_serving.remote()
        part.asked_s = now

    def _take_answer(self, part: _Part, now: float) -> None:
        import ray
        from ray.exceptions import RayError

        from scheduler.actors import cause

        done, _ = ray.wait([part.call], timeout=0)
        if not done:
            # A start takes as long as it takes: it waits for others.
            if not part.must_start and now - part.asked_s >= self._hang_s:
                self._say(f"{part.name} does not answer for {now - part.asked_s:.0f} s and is started again")
                ray.kill(part.actor, no_restart=False)
                part.asked_s = now
            return
        call, part.call = part.call, None
        problem = None
        try:
            if ray.get(call) is False:
                problem = "its process is new"
        except RayError as error:
            problem = cause(error)
        part.must_start = problem is not None and part is not self._scheduler
        if part.is_away != (problem is not None):
            part.is_away = problem is not None
            self._say(f"{part.name} is back" if problem is None else f"{part.name} starts again: {problem}")
