"""What a connection may send before its request is one, and what it may leave unread, over real sockets."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
import uvicorn
import uvloop
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from scheduler.api.connections import ConnectionLimits, Connections
from scheduler.api.protocol import HttpProtocol

HEAD = b"GET / HTTP/1.1\r\nHost: h\r\n"
GET = HEAD + b"\r\n"
LAST_GET = HEAD + b"Connection: close\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
HASTY = ConnectionLimits(client_timeout_s=0.05, linger_s=0.05)
USUAL = ConnectionLimits()


async def serve_body(scope: Scope, receive: Receive, send: Send) -> None:
    """Read the body, and answer with the names of the headers."""
    while (message := await receive())["type"] == "http.request" and message["more_body"]:
        pass
    await PlainTextResponse(b" ".join(name for name, _ in scope["headers"]))(scope, receive, send)


class Waiting:
    """Answers once it is told to. Notices a client that goes."""

    def __init__(self) -> None:
        self.came = asyncio.Event()
        self.go = asyncio.Event()
        self.answered = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.came.set()
        await self.go.wait()
        try:
            await PlainTextResponse("served")(scope, receive, send)
        finally:
            self.answered.set()


class Endless:
    """Streams until its client is gone."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.gone = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        watching = asyncio.ensure_future(self._watch(receive))
        while not self.gone.is_set():
            await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})
            self.began.set()
            await asyncio.sleep(0)
        await watching

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone.set()


@asynccontextmanager
async def listening(app: ASGIApp, limits: ConnectionLimits) -> AsyncIterator[tuple[str, int]]:
    """Serve an app, and give the address."""
    config = uvicorn.Config(app, lifespan="off", log_config=None, ws="none")
    config.load()
    state: Any = uvicorn.Server(config).server_state
    make = functools.partial(
        HttpProtocol,
        config=config,
        server_state=state,
        app_state={},
        limits=limits,
        all_connections=Connections(limits.max_connections),
    )
    listener = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
    async with listener:
        yield listener.sockets[0].getsockname()


@asynccontextmanager
async def connected(
    address: tuple[str, int],
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect until the block ends."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        yield reader, writer
    finally:
        writer.close()


async def exchange(*pieces: bytes, app: ASGIApp = serve_body, limits: ConnectionLimits = USUAL) -> bytes:
    """Send pieces to a server, each once the one before it is on its way, and return all that it answers."""
    async with listening(app, limits) as address, connected(address) as (reader, writer):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await reader.read()


def answer_to(*pieces: bytes, **options: Any) -> bytes:
    return asyncio.run(asyncio.wait_for(exchange(*pieces, **options), timeout=60))


def refusal(answer: bytes) -> tuple[bytes, str]:
    """Return the status line of an answer, and the message of its body."""
    head, body = answer.split(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert b"connection: close" in head
    return head.split(b"\r\n")[0], error["message"]


@pytest.mark.parametrize(
    "begin",
    [HEAD + b"X: ", b"GET /", CHUNKED + b"0\r\nX: ", CHUNKED + b"1;"],
    ids=["headers", "path", "trailers", "chunk extension"],
)
def test_what_has_no_end_is_refused(begin: bytes) -> None:
    # Not a byte more: with some unread, closing would reset the connection, and the answer might be lost.
    rest = b"a" * (USUAL.max_head_bytes + 1 - len(begin))
    status, message = refusal(answer_to(begin, rest))
    assert status == b"HTTP/1.1 431 Request Header Fields Too Large"
    assert message == "request line and headers, or trailers, must have at most 65536 bytes"


def test_a_head_that_does_not_come_in_time_is_refused() -> None:
    status, message = refusal(answer_to(HEAD, limits=HASTY))
    assert status == b"HTTP/1.1 408 Request Timeout"
    assert message == "request line and headers did not come within 0.05 s"


@pytest.mark.parametrize("begin", [b"", b"\r\n"])
def test_a_connection_without_a_request_is_closed(begin: bytes) -> None:
    assert answer_to(begin, limits=HASTY) == b""


@pytest.mark.parametrize(
    "nonsense",
    [
        b"nonsense\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT h:1 HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET / HTTP/1.1\r\nA\0B: c\r\n\r\n",
        CHUNKED + b"-1\r\n",
        CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\n"),
        b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
    ],
)
def test_what_is_no_http_gets_an_error_body(nonsense: bytes) -> None:
    status, message = refusal(answer_to(nonsense))
    assert (status, message) == (b"HTTP/1.1 400 Bad Request", "Invalid HTTP request received.")


def test_bodies_do_not_count_and_requests_in_pieces_are_served() -> None:
    body = b"a" * 100_000
    post = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 100000\r\n\r\n" + body
    answer = answer_to(post[:20], post[20:], HEAD, b"Connection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200 OK") == 2


def test_trailers_are_not_headers() -> None:
    chunks = b"1\r\na\r\n0\r\nAuthorization: Bearer x\r\n\r\n"
    answer = answer_to(CHUNKED + chunks + LAST_GET)
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert b"authorization" not in answer


def test_requests_that_wait_on_a_connection() -> None:
    """A few are answered in their order; no number of them fills the memory."""
    limits = ConnectionLimits(max_pipelined=3)
    assert answer_to(GET * 3 + LAST_GET, limits=limits).count(b"HTTP/1.1 200 OK") == 4

    async def run() -> None:
        app = Waiting()
        status, message = refusal(await exchange(GET * 5, app=app, limits=limits))
        assert status == b"HTTP/1.1 400 Bad Request"
        assert message == "at most 3 requests may wait on a connection"
        app.go.set()

    asyncio.run(asyncio.wait_for(run(), timeout=60))


def test_the_rest_of_a_request_that_was_answered_is_not_waited_for() -> None:
    async def run() -> None:
        async with (
            listening(PlainTextResponse("served"), HASTY) as address,
            connected(address) as (reader, writer),
        ):
            writer.write(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\na")
            await reader.readuntil(b"served")
            writer.write(b"a")
            assert await reader.read() == b""

    asyncio.run(asyncio.wait_for(run(), timeout=60))


def test_a_client_that_reads_nothing_is_left() -> None:
    async def run() -> None:
        app = Endless()
        async with listening(app, HASTY) as address:
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.setblocking(False)
                await asyncio.get_running_loop().sock_connect(client, address)
                await asyncio.get_running_loop().sock_sendall(client, GET)
                await app.gone.wait()

    asyncio.run(asyncio.wait_for(run(), timeout=60))


@pytest.mark.parametrize("num_behind", [0, 1])
def test_a_request_learns_that_its_client_is_gone(num_behind: int) -> None:
    """Also with others behind it on its connection, and without sending anything."""

    async def run() -> None:
        began, gone = asyncio.Event(), asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            began.set()
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()

        async with listening(app, USUAL) as address:
            async with connected(address) as (_, writer):
                writer.write(GET + GET * num_behind)
                await began.wait()
            await gone.wait()

    asyncio.run(asyncio.wait_for(run(), timeout=60))


def test_an_answer_to_a_connection_that_was_closed_meanwhile_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """uvloop's transports raise on whatever is written to them once they are closed."""

    async def run() -> None:
        app = Waiting()
        async with listening(app, USUAL) as address, connected(address) as (reader, writer):
            writer.write(GET + GET + b"nonsense\r\n\r\n")
            status, _ = refusal(await reader.read())
            assert status == b"HTTP/1.1 400 Bad Request"
            app.go.set()
            await app.answered.wait()

    with caplog.at_level(logging.ERROR):
        uvloop.run(asyncio.wait_for(run(), timeout=60))
    assert caplog.text == ""


def test_an_error_does_not_end_up_in_the_middle_of_an_answer() -> None:
    async def run() -> None:
        app = Endless()
        async with listening(app, USUAL) as address, connected(address) as (reader, writer):
            writer.write(GET)
            await app.began.wait()
            writer.write(b"nonsense\r\n\r\n")
            answer = b""
            with suppress(ConnectionResetError):
                while part := await reader.read(65_536):
                    answer += part
            assert answer.count(b"HTTP/1.1") == 1
            assert b"error" not in answer
            await app.gone.wait()

    asyncio.run(asyncio.wait_for(run(), timeout=60))


def test_an_idle_connection_makes_room_for_a_new_one_and_a_busy_one_does_not() -> None:
    async def run() -> None:
        app = Waiting()
        async with listening(app, ConnectionLimits(max_connections=1)) as address, AsyncExitStack() as stack:
            idle, _ = await stack.enter_async_context(connected(address))
            busy, to_busy = await stack.enter_async_context(connected(address))
            assert await idle.read() == b""
            to_busy.write(GET)
            await app.came.wait()

            refused, to_refused = await stack.enter_async_context(connected(address))
            to_refused.write(GET)
            answer = await refused.read()
            status, message = refusal(answer)
            assert status == b"HTTP/1.1 503 Service Unavailable"
            assert message == "this server must have at most 1 connections"
            assert b"\r\nretry-after: 1\r\n" in answer

            app.go.set()
            await busy.readuntil(b"served")
            later, to_later = await stack.enter_async_context(connected(address))
            to_later.write(LAST_GET)
            assert b"served" in await later.read()
            assert await busy.read() == b""

    asyncio.run(asyncio.wait_for(run(), timeout=60))


@pytest.mark.parametrize(
    "request_",
    [
        HEAD + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        b"HTTP2-Settings: AA\r\nContent-Length: 2\r\n\r\nhi",
    ],
    ids=["websocket", "h2c"],
)
def test_no_other_protocol_is_spoken(request_: bytes) -> None:
    answer = answer_to(request_)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"connection: close\r\n" in answer
