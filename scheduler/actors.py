"""The other actors, as one of them sees them: by name, with answers that are waited for beside everything else."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import ray
from ray.exceptions import RayActorError

from scheduler.messages import RAY_NAMESPACE


class Actors:
    """Owns handles of named actors, and the tasks that wait for them. Belongs to one event loop."""

    def __init__(self) -> None:
        self._handles: dict[str, Any] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, name: str) -> Any:
        """Return an actor's handle. Raises ValueError if Ray knows no actor of that name (any more)."""
        if name not in self._handles:
            self._handles[name] = ray.get_actor(name, namespace=RAY_NAMESPACE)
        return self._handles[name]

    def forget(self, name: str) -> None:
        """An actor is gone, or its process is."""
        self._handles.pop(name, None)

    async def lives(self, name: str) -> bool:
        """Wait until an actor has done what it does, or is known to be dead."""
        try:
            await self.handle(name).__ray_ready__.remote()
        except (RayActorError, ValueError):  # ValueError: Ray knows no actor of that name any more
            return False
        return True

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run something beside everything else."""
        # asyncio itself keeps no reference to a running task.
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel_all(self) -> None:
        """End all that was spawned."""
        for task in self._tasks:
            task.cancel()


def cause(error: Exception) -> str:
    """Return the last line of an error from another process: its own message, without the traceback."""
    return str(error).strip().splitlines()[-1]
