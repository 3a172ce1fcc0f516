"""Redis' protocol (RESP2) over one connection, for commands that are many and small.

A general client takes some 70 us of the event loop for each pipeline; for each request that an ApiServer accepts
that would be a twentieth of all it does. This one writes the commands of one turn of the loop at once, and
reads answers as they come.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from scheduler.journal.base import JournalError

CONNECT_TIMEOUT_S = 1.0
CALL_TIMEOUT_S = 2.0

Command = tuple[str | int | bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """Where a Redis is, and who asks it."""

    host: str
    port: int
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False


class DirectPipe:
    """Asks one Redis; connects when it has to. A `Pipe`."""

    def __init__(self, address: RedisAddress) -> None:
        self._address = address
        self._connection: _Connection | None = None
        self._connecting: asyncio.Task[_Connection] | None = None

    async def calls(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands, in this order, and return their answers. Raises JournalError if one has none."""
        connection = self._connection
        if connection is None or connection.is_closed:
            # One attempt for all who wait: each with its own, the last would wait for all that come to nothing.
            if self._connecting is None:
                self._connecting = asyncio.create_task(self._connect())
                self._connecting.add_done_callback(self._has_tried)
            connection = await asyncio.shield(self._connecting)
        return await connection.ask(commands)

    async def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.abort("the connection is closed")

    def _has_tried(self, attempt: asyncio.Task[_Connection]) -> None:
        self._connecting = None
        if not attempt.cancelled():
            attempt.exception()  # Whoever waited for it may be gone.

    async def _connect(self) -> _Connection:
        address = self._address
        context = ssl.create_default_context() if address.tls else None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_connection(
                    _Connection, address.host, address.port, ssl=context
                )
        except TimeoutError:
            raise JournalError(f"no connection within {CONNECT_TIMEOUT_S:g} s") from None
        except OSError as error:
            raise JournalError(f"no connection: {error}") from error
        greeting: list[Command] = []
        if address.password is not None:
            user = () if address.username is None else (address.username,)
            greeting.append(("AUTH", *user, address.password))
        if address.db:
            greeting.append(("SELECT", address.db))
        try:
            await connection.ask(greeting)
        except BaseException:
            connection.abort("the connection was refused")
            raise
        self._connection = connection
        return connection


@dataclass(slots=True, kw_only=True)
class _Waiter:
    """Whoever waits for the answers to some commands that were sent together."""

    future: asyncio.Future[list[Any]]
    num_missing: int
    deadline_s: float
    answers: list[Any] = field(default_factory=list)


class _Connection(asyncio.Protocol):
    """One connection: answers come in the order of the commands. Gives itself up if one takes too long."""

    def __init__(self) -> None:
        self.is_closed = False
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []
        self._waiters: deque[_Waiter] = deque()
        self._received = bytearray()
        self._num_needed = 0
        self._watch: asyncio.TimerHandle | None = None

    async def ask(self, commands: Sequence[Command]) -> list[Any]:
        """Return the answers. Raises JournalError."""
        if self.is_closed:
            raise JournalError("the connection is closed")
        if not commands:
            return []
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent += map(encode, commands)
        deadline_s = self._loop.time() + CALL_TIMEOUT_S
        waiter = _Waiter(future=self._loop.create_future(), num_missing=len(commands), deadline_s=deadline_s)
        self._waiters.append(waiter)
        if self._watch is None:
            self._watch = self._loop.call_at(deadline_s, self._check)
        return await waiter.future

    def abort(self, reason: str) -> None:
        """Close the connection and tell everybody who waits."""
        self.is_closed = True
        if self._transport is not None:
            self._transport.abort()
        if self._watch is not None:
            self._watch.cancel()
        waiters, self._waiters = self._waiters, deque()
        for waiter in waiters:
            if not waiter.future.done():
                waiter.future.set_exception(JournalError(reason))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self.abort(f"the connection broke: {exc}" if exc else "Redis closed the connection")

    def data_received(self, data: bytes) -> None:
        """Called by the event loop: hand out the answers that are whole."""
        self._received += data
        if len(self._received) < self._num_needed:
            return
        at = 0
        try:
            while at < len(self._received):
                answer, at = parse(self._received, at)
                self._answered(answer)
        except Incomplete as error:
            self._num_needed = error.num_bytes - at
        except ValueError as error:
            self.abort(f"that is no Redis: {error}")
            return
        else:
            self._num_needed = 0
        del self._received[:at]

    def _flush(self) -> None:
        commands, self._unsent = self._unsent, []
        if self._transport is not None and not self.is_closed:
            self._transport.write(b"".join(commands))

    def _answered(self, answer: Any) -> None:
        if not self._waiters:
            raise ValueError("an answer came that nobody asked for")
        waiter = self._waiters[0]
        waiter.answers.append(answer)
        waiter.num_missing -= 1
        if waiter.num_missing:
            return
        self._waiters.popleft()
        if waiter.future.done():
            return  # Whoever asked was cancelled.
        failure = next((answer for answer in waiter.answers if isinstance(answer, ReplyError)), None)
        if failure is not None:
            waiter.future.set_exception(JournalError(str(failure)))
        else:
            waiter.future.set_result(waiter.answers)

    def _check(self) -> None:
        """Give up if the oldest command has no answer in time; look again when the next one is due."""
        self._watch = None
        if not self._waiters:
            return
        if self._waiters[0].deadline_s <= self._loop.time():
            self.abort(f"no answer within {CALL_TIMEOUT_S:g} s")
        else:
            self._watch = self._loop.call_at(self._waiters[0].deadline_s, self._check)


class ReplyError(Exception):
    """What Redis has against a command."""


class Incomplete(Exception):  # noqa: N818
    """More must come before an answer is whole."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.num_bytes = num_bytes
        """How many there must at least be."""


def encode(command: Command) -> bytes:
    """Return a command as it is sent."""
    parts = [b"*%d\r\n" % len(command)]
    for part in command:
        data = part if isinstance(part, bytes) else str(part).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


def parse(data: bytearray, at: int) -> tuple[Any, int]:
    """Return the answer that begins at this place, and where it ends.

    Texts are bytes, and what Redis has against a command is a ReplyError. Raises Incomplete, and ValueError if
    this is no answer.
    """
    end = data.find(b"\r\n", at)
    if end < 0:
        raise Incomplete(len(data) + 1)
    kind, line, at = data[at], bytes(data[at + 1 : end]), end + 2
    match chr(kind):
        case "+":
            return line, at
        case "-":
            return ReplyError(line.decode(errors="replace")), at
        case ":":
            return int(line), at
        case "$":
            stop = at + int(line)
            if stop < at:
                return None, at
            if len(data) < stop + 2:
                raise Incomplete(stop + 2)
            return bytes(data[at:stop]), stop + 2
        case "*":
            num_items = int(line)
            if num_items < 0:
                return None, at
            items = []
            for _ in range(num_items):
                item, at = parse(data, at)
                items.append(item)
            return items, at
    raise ValueError(f"an answer begins with byte {kind}")
