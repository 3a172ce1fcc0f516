"""A client that streams completions and takes little time for it, so that what is measured is the server."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

_TEXT = re.compile(rb'"text": ?"([^"]*)"')


@dataclass(slots=True, kw_only=True)
class Answer:
    """When one request's tokens arrived, in seconds."""

    sent_at: float
    arrivals: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """Tokens of each arrival."""

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0] - self.sent_at

    @property
    def gaps(self) -> list[float]:
        """Seconds per token, one for each arrival after the first."""
        pairs = itertools.pairwise(self.arrivals)
        return [(late - early) / n for (early, late), n in zip(pairs, self.counts[1:], strict=True)]


class StreamClient:
    """Sends requests to one path of one server, each on a connection of its own, and keeps these for the next."""

    def __init__(self, url: str, path: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = str(parts.hostname), parts.port or 80
        self._head = (
            f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n".encode()
        )
        self._idle: list[_Connection] = []

    async def ask(self, body: bytes) -> Answer:
        """Send a request and return when its tokens came. Raises `RuntimeError` for any answer but 200."""
        while self._idle and self._idle[-1].is_closed:
            self._idle.pop()
        if self._idle:
            connection = self._idle.pop()
        else:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(_Connection, self._host, self._port)
        answer = await connection.ask(self._head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self._idle.append(connection)
        return answer

    def close(self) -> None:
        """Close the connections."""
        for connection in self._idle:
            connection.close()


class _Connection(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser
        self._answer: Answer
        self._done: asyncio.Future[Answer] | None = None
        self._rest = b""
        self.is_closed = False

    async def ask(self, request: bytes) -> Answer:
        self._done = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self._answer = Answer(sent_at=time.perf_counter())
        self._transport.write(request)
        return await self._done

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        self._fail(f"the connection ended: {exc}")

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        """Count the tokens of the events that have arrived whole."""
        whole, found, rest = (self._rest + body).rpartition(b"\n\n")
        self._rest = rest
        count = count_tokens(_TEXT.findall(whole)) if found else 0
        if count:
            self._answer.arrivals.append(time.perf_counter())
            self._answer.counts.append(count)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            self._fail(f"HTTP {status}: {self._rest.decode(errors='replace')}")
        elif self._done is not None and not self._done.done():
            self._done.set_result(self._answer)

    def _fail(self, reason: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(RuntimeError(reason))


def count_tokens(texts: Iterable[bytes]) -> int:
    """Return the tokens of these texts, where each token is a word."""
    return sum(len(text.split()) for text in texts)
