"""What a connection may send before its request is one, over real sockets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import uvicorn
from starlette.responses import PlainTextResponse

from scheduler.api.protocol import HttpProtocol

HEAD = b"GET / HTTP/1.1\r\nHost: h\r\n"


class Hasty(HttpProtocol):
    """Waits for a moment only."""

    head_timeout_s = 0.05


async def exchange(protocol: type[HttpProtocol], *pieces: bytes) -> bytes:
    """Send pieces to a server, each once the one before it is on its way, and return all that it answers."""
    config = uvicorn.Config(PlainTextResponse("served"), http=protocol, lifespan="off", log_config=None)
    config.load()
    server = uvicorn.Server(config)
    state: Any = server.server_state

    def connection() -> HttpProtocol:
        return protocol(config=config, server_state=state, app_state={})

    listener = await asyncio.get_running_loop().create_server(connection, "127.0.0.1", 0)
    async with listener:
        reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        answer = await reader.read()
        writer.close()
    return answer


def refusal(answer: bytes) -> tuple[bytes, str]:
    """Return the status line of an answer, and the message of its body."""
    head, body = answer.split(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return head.split(b"\r\n")[0], error["message"]


@pytest.mark.parametrize("begin", [HEAD + b"X: ", b"GET /"])
def test_a_head_without_end_is_refused(begin: bytes) -> None:
    # Not a byte more: with some unread, closing would reset the connection, and the answer might be lost.
    rest = b"a" * (HttpProtocol.max_head_bytes + 1 - len(begin))
    status, message = refusal(asyncio.run(exchange(HttpProtocol, begin, rest)))
    assert status == b"HTTP/1.1 431 Request Header Fields Too Large"
    assert message == "request line and headers must have at most 65536 bytes"


def test_a_head_that_does_not_come_in_time_is_refused() -> None:
    status, message = refusal(asyncio.run(exchange(Hasty, HEAD)))
    assert status == b"HTTP/1.1 408 Request Timeout"
    assert message == "request line and headers did not come within 0.05 s"


def test_a_connection_without_a_request_is_closed() -> None:
    assert asyncio.run(exchange(Hasty)) == b""


def test_what_is_no_http_gets_an_error_body() -> None:
    status, message = refusal(asyncio.run(exchange(HttpProtocol, b"nonsense\r\n\r\n")))
    assert (status, message) == (b"HTTP/1.1 400 Bad Request", "Invalid HTTP request received.")


def test_bodies_do_not_count_and_requests_in_pieces_are_served() -> None:
    body = b"a" * 100_000
    post = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 100000\r\n\r\n" + body
    answer = asyncio.run(exchange(HttpProtocol, post[:20], post[20:], HEAD, b"Connection: close\r\n\r\n"))
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert answer.count(b"served") == 2
