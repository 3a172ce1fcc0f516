"""The two ways to an actor, Ray's calls and a connection on the same host, keep the same contract."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError, RayTaskError

from scheduler.errors import InvalidRequestError
from scheduler.messages import RAY_NAMESPACE
from scheduler.wire import AsyncioReactor, Peer, RayPeer, Wire, serve_actor
from scheduler.workers import create_actor

NAME = "echo"


class Echo:
    """Notes what it is told, and by which way."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.noted: list[int] = []
        self.num_by_wire = 0

    async def begin(self) -> int:
        """Listen, and return the process id."""
        if not hasattr(self, "server"):
            self.server = serve_actor(
                self.name,
                AsyncioReactor(),
                {"note": self.note_by_wire, "all": self.all, "fail": self.fail, "hang": self.hang},
            )
        return os.getpid()

    async def note(self, number: int, _: bytes = b"") -> None:
        self.noted.append(number)

    def note_by_wire(self, number: int, _: bytes = b"") -> None:
        self.num_by_wire += 1
        self.noted.append(number)

    async def all(self) -> list[int]:
        noted, self.noted = self.noted, []
        return noted

    async def by_wire(self) -> int:
        return self.num_by_wire

    async def fail(self) -> None:
        raise InvalidRequestError("prompt must not be empty", param="prompt")

    async def hang(self) -> None:
        await asyncio.Event().wait()


@pytest.fixture(scope="module")
def echo() -> Iterator[Any]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(
        address="local",
        namespace=RAY_NAMESPACE,
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=80 * 1024 * 1024,
        logging_level=logging.ERROR,
    )
    yield create_actor(Echo, NAME, NAME, max_restarts=-1)
    ray.shutdown()


@pytest.fixture(params=["ray", "wire"])
def run(request: pytest.FixtureRequest, echo: Any) -> Callable[[Callable[[Peer], Awaitable[None]]], None]:
    """Return what runs a scenario on one of the ways."""

    async def scenario_on(scenario: Callable[[Peer], Awaitable[None]]) -> None:
        await begun(echo)
        if request.param == "ray":
            await scenario(RayPeer(echo))
            return
        wire = Wire(AsyncioReactor())
        try:
            before = await echo.by_wire.remote()
            wire.post(NAME, "note", 0)
            assert await wire.call(NAME, "all") == [0]
            assert await echo.by_wire.remote() == before + 1
            await scenario(wire.peer(NAME))
        finally:
            wire.close()

    return lambda scenario: asyncio.run(scenario_on(scenario))


async def begun(echo: Any) -> int:
    """Return the process id of the actor as soon as it listens."""
    while True:
        try:
            pid: int = await echo.begin.remote()
            return pid
        except RayActorError:
            pass  # It starts again.


async def all_noted(peer: Peer, count: int) -> list[int]:
    """Wait until the actor has noted so many numbers. Ray's calls may overtake each other."""
    noted: list[int] = []
    while len(noted) < count:
        noted += await peer.call("all")
    return sorted(noted)


def test_each_message_comes_once(run: Any) -> None:
    async def scenario(peer: Peer) -> None:
        for number in range(100):
            peer.post("note", number)
        assert await all_noted(peer, 100) == list(range(100))

    run(scenario)


def test_what_a_method_raises_is_raised_with_its_class_and_message(run: Any) -> None:
    async def scenario(peer: Peer) -> None:
        with pytest.raises(RayTaskError) as caught:
            await peer.call("fail")
        assert isinstance(caught.value, InvalidRequestError)
        assert "prompt must not be empty" in str(caught.value)

    run(scenario)


def test_a_call_fails_with_its_process_and_the_next_one_finds_the_new_process(run: Any, echo: Any) -> None:
    async def scenario(peer: Peer) -> None:
        pid = await begun(echo)
        call = asyncio.ensure_future(peer.call("hang"))
        peer.post("note", 1)
        while 1 not in await echo.all.remote():
            pass  # Then it has the call, too.
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RayActorError):
            await call
        assert await begun(echo) != pid
        peer.post("note", 2)
        assert await all_noted(peer, 1) == [2]

    run(scenario)


def test_a_process_that_is_stopped_holds_nobody_up_and_gets_everything_once_it_goes_on(
    run: Any, echo: Any
) -> None:
    async def scenario(peer: Peer) -> None:
        pid = await begun(echo)
        os.kill(pid, signal.SIGSTOP)
        for number in range(40):
            peer.post("note", number, b"x" * 2**20)
        os.kill(pid, signal.SIGCONT)
        assert await all_noted(peer, 40) == list(range(40))

    run(scenario)
