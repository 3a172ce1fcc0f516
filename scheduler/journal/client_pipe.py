"""Redis through its general client, which finds its way in clusters and by sentinels."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis, RedisCluster

from scheduler.journal.base import JournalError
from scheduler.journal.resp import CALL_TIMEOUT_S, Command

_MAX_BATCH = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiter:
    commands: Sequence[Command]
    future: asyncio.Future[list[Any]]


class ClientPipe:
    """A `Pipe` in which commands that come while others are on their way travel together."""

    def __init__(self, client: Redis | RedisCluster) -> None:
        self._client: Any = client
        self._waiters: list[_Waiter] = []
        self._sending: asyncio.Task[None] | None = None

    async def calls(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands and return their answers. Raises JournalError."""
        waiter = _Waiter(commands=commands, future=asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())
        return await waiter.future

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()
        manager = getattr(getattr(self._client, "connection_pool", None), "sentinel_manager", None)
        for sentinel in manager.sentinels if manager is not None else ():
            await sentinel.aclose()

    async def _send(self) -> None:
        """Send what waits, pipeline after pipeline."""
        while self._waiters:
            batch, self._waiters = self._waiters[:_MAX_BATCH], self._waiters[_MAX_BATCH:]
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    pipeline = self._client.pipeline(transaction=False)
                    for waiter in batch:
                        for command in waiter.commands:
                            pipeline.execute_command(*command)
                    answers = iter(await pipeline.execute(raise_on_error=False))
            except Exception as error:
                # Not all that the client raises is a RedisError: not RedisClusterException.
                reason = str(error) or f"no answer within {CALL_TIMEOUT_S:g} s"
                for waiter in batch:
                    _fail(waiter, reason)
                continue
            for waiter in batch:
                own = [next(answers) for _ in waiter.commands]
                failure = next((answer for answer in own if isinstance(answer, Exception)), None)
                if failure is not None:
                    _fail(waiter, str(failure))
                elif not waiter.future.done():
                    waiter.future.set_result(own)


def _fail(waiter: _Waiter, reason: str) -> None:
    if not waiter.future.done():
        waiter.future.set_exception(JournalError(reason))
