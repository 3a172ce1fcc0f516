"""The other actors, as one of them sees them: by name, with answers that are waited for beside everything else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any

from ray.exceptions import RayActorError

from scheduler.wire import AsyncioReactor, RayPeer, Wire


class Actors:
    """Owns the ways to named actors, and the tasks that wait for them. Belongs to one event loop."""

    def __init__(self) -> None:
        self._wire_if_made: Wire | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def _wire(self) -> Wire:
        # Not earlier: an actor is made outside of its event loop.
        if self._wire_if_made is None:
            self._wire_if_made = Wire(AsyncioReactor())
        return self._wire_if_made

    def handle(self, name: str) -> Any:
        """Return an actor's handle. Raises ValueError if Ray knows no actor of that name (any more)."""
        return self._wire.handle(name)

    def call(self, name: str, method: str, *args: Any) -> Awaitable[Any]:
        """Call a method by the shortest way, at once, and return what it returns.

        When awaited it raises as `Wire.call`; also `RayActorError` if Ray knows no actor of that name (any more).
        """
        try:
            return self._wire.call(name, method, *args)
        except ValueError as error:
            return _raise(RayActorError(error_msg=str(error)))

    def post(self, name: str, method: str, *args: Any) -> None:
        """Call a method by the shortest way, and forget it. Raises as `handle`."""
        self._wire.post(name, method, *args)

    def forget(self, name: str) -> None:
        """An actor is gone, or its process is: calls to it that are under way fail."""
        self._wire.forget(name)

    async def lives(self, name: str) -> bool:
        """Wait until an actor has done what it does, or is known to be dead."""
        return await self._answers(name, "__ray_ready__")

    async def retire(self, name: str, life: int) -> bool:
        """Do as `lives` with a prefill worker, which computes no batch of a scheduler before `life` from then on."""
        return await self._answers(name, "retire", life)

    async def _answers(self, name: str, method: str, *args: Any) -> bool:
        try:
            await RayPeer(self.handle(name)).call(method, *args)
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


async def _raise(error: Exception) -> None:
    raise error


def cause(error: Exception) -> str:
    """Return the last line of an error from another process: its own message, without the traceback."""
    return str(error).strip().splitlines()[-1]
