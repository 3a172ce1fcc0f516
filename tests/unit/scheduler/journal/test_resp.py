"""Redis' protocol, without a Redis: answers that come in pieces, late, or wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.journal.base import JournalError
from scheduler.journal.resp import DirectPipe, Incomplete, RedisAddress, encode, parse

ANSWERS = st.recursive(
    st.none() | st.integers(-(2**40), 2**40) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=3),
)


def as_sent(answer: Any) -> bytes:
    if answer is None:
        return b"$-1\r\n"
    if isinstance(answer, int):
        return b":%d\r\n" % answer
    if isinstance(answer, bytes):
        return b"$%d\r\n%b\r\n" % (len(answer), answer)
    return b"*%d\r\n" % len(answer) + b"".join(map(as_sent, answer))


@given(ANSWERS)
def test_an_answer_is_read_once_it_is_whole(answer: Any) -> None:
    data = as_sent(answer)
    assert parse(bytearray(b"xx" + data + b"yy"), 2) == (answer, 2 + len(data))
    for length in range(len(data)):
        with pytest.raises(Incomplete) as caught:
            parse(bytearray(data[:length]), 0)
        assert length < caught.value.num_bytes <= len(data)


def test_a_command_is_binary_safe() -> None:
    assert (
        encode(("SET", b"\r\n\x00", 5, "é"))
        == b"*4\r\n$3\r\nSET\r\n$3\r\n\r\n\x00\r\n$1\r\n5\r\n$2\r\n\xc3\xa9\r\n"
    )


def talk(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], **address: Any
) -> Any:
    """Return the answers to PING and ECHO of a server that behaves like this."""

    async def scenario() -> Any:
        done = asyncio.Event()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await serve(reader, writer)
            await done.wait()
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        pipe = DirectPipe(RedisAddress(host="127.0.0.1", port=port, **address))
        try:
            return await pipe.calls([("PING",), ("ECHO", "a")])
        finally:
            done.set()
            await pipe.close()
            server.close()
            await server.wait_closed()

    return asyncio.run(asyncio.wait_for(scenario(), 60))


@given(st.integers(1, 12))
def test_answers_may_come_in_pieces(size: int) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(encode(("PING",)) + encode(("ECHO", "a"))))
        data = b"+PONG\r\n$1\r\na\r\n"
        for start in range(0, len(data), size):
            writer.write(data[start : start + size])
            await writer.drain()

    assert talk(serve) == [b"PONG", b"a"]


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"+PONG\r\n-OOM command not allowed\r\n", "OOM command not allowed"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "that is no Redis"),
        (b"+PONG\r\n", "no answer within 2 s"),
    ],
)
def test_a_wrong_answer_is_an_error_with_its_reason(sent: bytes, reason: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"a\r\n")
        writer.write(sent)

    with pytest.raises(JournalError, match=reason):
        talk(serve)


def test_a_password_goes_first_and_may_be_refused() -> None:
    seen = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readexactly(len(encode(("AUTH", "user", "pass")) + encode(("SELECT", 3)))))
        writer.write(b"-WRONGPASS invalid username-password pair\r\n+OK\r\n")

    with pytest.raises(JournalError, match="WRONGPASS"):
        talk(serve, username="user", password="pass", db=3)
    assert seen == [encode(("AUTH", "user", "pass")) + encode(("SELECT", 3))]


def test_nobody_there_is_an_error() -> None:
    async def scenario() -> None:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        with pytest.raises(JournalError, match="no connection"):
            await DirectPipe(RedisAddress(host="127.0.0.1", port=port)).calls([("PING",)])

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_who_waits_for_the_same_connection_is_refused_with_it() -> None:
    """Each with an attempt of its own, one after the other, the last would wait for as many time limits."""

    async def scenario() -> None:
        num_connections = 0

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_connections
            num_connections += 1
            await reader.read(1)
            writer.write(b"-WRONGPASS invalid username-password pair\r\n")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        pipe = DirectPipe(RedisAddress(host="127.0.0.1", port=port, password="wrong"))
        try:
            failures = await asyncio.gather(
                *(pipe.calls([("PING",)]) for _ in range(5)), return_exceptions=True
            )
            assert [str(failure)[:9] for failure in failures] == ["WRONGPASS"] * 5
            assert num_connections == 1
            with pytest.raises(JournalError, match="WRONGPASS"):
                await pipe.calls([("PING",)])
            assert num_connections == 2
        finally:
            await pipe.close()
            server.close()
            await server.wait_closed()

    asyncio.run(asyncio.wait_for(scenario(), 60))
