"""Connections between two ends in one process, or to a process that is not ours. Actors: tests/integration."""

from __future__ import annotations

import asyncio
import os
import queue
import struct
import subprocess
import sys
import uuid
from concurrent.futures import Future
from typing import Any

import pytest

from scheduler.messages import RAY_NAMESPACE
from scheduler.wire import AsyncioReactor, ThreadReactor, Wire, WireServer
from scheduler.wire.address import address_of, connect, listen
from scheduler.wire.channel import MAX_BACKLOG_BYTES

NOBODY = 65534
CLIENT = """
import os, socket, sys
os.setuid(int(sys.argv[2]))  # not earlier: that user may not be allowed to run this Python
connection = socket.socket(socket.AF_UNIX)
connection.connect(chr(0) + sys.argv[1])
print(connection.recv(1))
"""
SERVER = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
listener = socket.socket(socket.AF_UNIX)
listener.bind(chr(0) + sys.argv[1])
listener.listen()
print("listens", flush=True)
connection, _ = listener.accept()
print(connection.recv(1))
"""


class ByRay:
    """The handle of an actor, of which all calls are noted."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, method: str) -> Any:
        class Method:
            @staticmethod
            def remote(*args: Any) -> asyncio.Future[str] | None:
                self.calls.append((method, args))
                if method != "ask":
                    return None
                answer = asyncio.get_running_loop().create_future()
                answer.set_result("by Ray")
                return answer

        return Method()


@pytest.fixture
def cluster() -> str:
    """The name of a cluster that no other test has."""
    return uuid.uuid4().hex


@pytest.fixture
def reactor() -> ThreadReactor:
    return ThreadReactor("wire of a test")


def address(cluster: str, name: str = "actor") -> str:
    return address_of(cluster, RAY_NAMESPACE, name)


def wire_to(handle: ByRay, reactor: Any, cluster: str) -> Wire:
    return Wire(reactor, cluster=cluster, find=lambda name: handle)


def test_messages_between_threads_come_in_order(reactor: ThreadReactor, cluster: str) -> None:
    taken: queue.SimpleQueue[int] = queue.SimpleQueue()
    server = WireServer(address(cluster), reactor, {"put": lambda n, _: taken.put(n)})
    handle = ByRay()
    wire = wire_to(handle, reactor, cluster)
    # More than the kernel holds, so that some wait in between.
    for n in range(64):
        wire.post("actor", "put", n, b"x" * 60_000)
    assert [taken.get(timeout=30) for _ in range(64)] == list(range(64))
    assert handle.calls == []
    wire.close()
    server.close()


def test_without_a_connection_messages_go_by_ray(cluster: str) -> None:
    async def scenario() -> None:
        handle = ByRay()
        wire = wire_to(handle, AsyncioReactor(), cluster)
        wire.post("actor", "put", 1)
        assert await wire.call("actor", "ask", 2) == "by Ray"
        assert handle.calls == [("put", (1,)), ("ask", (2,))]

    asyncio.run(scenario())


def test_a_server_takes_up_a_name_once_its_former_owner_is_gone(reactor: ThreadReactor, cluster: str) -> None:
    taken: queue.SimpleQueue[str] = queue.SimpleQueue()
    former = listen(address(cluster))
    server = WireServer(address(cluster), reactor, {"put": taken.put})
    assert not server.is_listening
    former.close()
    while (connection := connect(address(cluster))) is None:
        pass  # It tries again by itself.
    connection.close()
    wire = wire_to(ByRay(), reactor, cluster)
    wire.post("actor", "put", "said")
    assert taken.get(timeout=30) == "said"
    wire.close()
    server.close()


def test_a_peer_that_does_not_read_is_given_no_more_than_the_bound(
    reactor: ThreadReactor, cluster: str
) -> None:
    listener = listen(address(cluster))
    handle = ByRay()
    wire = wire_to(handle, reactor, cluster)
    part = b"x" * (1024 * 1024)
    count = 3 * MAX_BACKLOG_BYTES // len(part)
    for n in range(count):
        wire.post("actor", "put", n, part)
    by_ray = [args[0] for _, args in handle.calls]
    # What the backlog does not take goes by Ray, whole and once.
    assert by_ray == list(range(by_ray[0], count))
    assert MAX_BACKLOG_BYTES // len(part) <= by_ray[0] < count
    wire.close()
    listener.close()


def test_a_message_too_large_for_a_frame_goes_by_ray(
    reactor: ThreadReactor, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.wire.frames.MAX_FRAME_BYTES", 1000)
    server = WireServer(address(cluster), reactor, {})
    handle = ByRay()
    wire = wire_to(handle, reactor, cluster)
    wire.post("actor", "put", b"x" * 1000)
    assert handle.calls == [("put", (b"x" * 1000,))]
    wire.close()
    server.close()


def test_a_frame_that_is_none_ends_its_connection_alone(reactor: ThreadReactor, cluster: str) -> None:
    taken: queue.SimpleQueue[int] = queue.SimpleQueue()
    server = WireServer(address(cluster), reactor, {"put": taken.put})
    wire = wire_to(ByRay(), reactor, cluster)
    wire.post("actor", "put", 1)
    for data in (struct.pack(">I", 2**32 - 1), struct.pack(">I", 3) + b"abc"):
        broken = connect(address(cluster))
        assert broken is not None
        broken.setblocking(True)
        broken.sendall(data)
        assert broken.recv(1) == b""
        broken.close()
    wire.post("actor", "put", 2)
    assert [taken.get(timeout=30), taken.get(timeout=30)] == [1, 2]
    wire.close()
    server.close()


def test_a_call_whose_caller_waits_no_more_disturbs_nobody(reactor: ThreadReactor, cluster: str) -> None:
    answers: list[Future[int]] = [Future(), Future()]
    server = WireServer(address(cluster), reactor, {"ask": lambda i: answers[i]})

    async def scenario() -> None:
        wire = wire_to(ByRay(), AsyncioReactor(), cluster)
        first, second = (asyncio.ensure_future(wire.call("actor", "ask", i)) for i in range(2))
        first.cancel()
        answers[0].set_result(0)
        answers[1].set_result(1)
        assert await second == 1
        wire.close()

    asyncio.run(scenario())
    server.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can have a child with another user")
def test_a_client_of_another_user_is_refused(reactor: ThreadReactor, cluster: str) -> None:
    server = WireServer(address(cluster), reactor, {})
    child = subprocess.run(
        [sys.executable, "-c", CLIENT, address(cluster)[1:], str(NOBODY)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert child.stdout == "b''\n"
    server.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can have a child with another user")
def test_a_server_of_another_user_is_told_nothing(reactor: ThreadReactor, cluster: str) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", SERVER, address(cluster)[1:], str(NOBODY)],
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "listens\n"
        handle = ByRay()
        wire_to(handle, reactor, cluster).post("actor", "put", 1)
        assert handle.calls == [("put", (1,))]
        assert child.stdout.readline() == "b''\n"
