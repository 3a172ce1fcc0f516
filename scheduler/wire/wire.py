"""The end from which messages go to other actors: by a connection where there is one, else by Ray."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayTaskError

from scheduler.messages import RAY_NAMESPACE
from scheduler.wire.address import address_of, cluster_address, connect
from scheduler.wire.channel import Channel
from scheduler.wire.frames import Answer, Call, Failure, FrameTooLargeError, Message, Post, encode
from scheduler.wire.peer import Peer, RayPeer
from scheduler.wire.reactor import Reactor

_ABSENCE_S = 0.5
"""How long an actor that does not listen is taken not to: it starts, or is on another host."""


class Wire:
    """Owns the connections of one process to other actors, by their names.

    Both ends of a connection are processes of one host, so it only breaks when one of them ends. What was sent to a
    process that ends is lost, or was carried out, as with a call of Ray: nothing is sent a second time.
    """

    def __init__(
        self,
        reactor: Reactor,
        *,
        cluster: str | None = None,
        namespace: str = RAY_NAMESPACE,
        find: Callable[[str], Any] | None = None,
    ) -> None:
        """`cluster`: the address of Ray's GCS, if not that of this process. `find`: returns an actor's handle."""
        self._reactor = reactor
        self._cluster = cluster_address() if cluster is None else cluster
        self._namespace = namespace
        self._find = find or (lambda name: ray.get_actor(name, namespace=namespace))
        self._lock = threading.Lock()
        self._handles: dict[str, Any] = {}
        self._connections: dict[str, _Connection] = {}
        self._absent_until: dict[str, float] = {}

    def handle(self, name: str) -> Any:
        """Return an actor's handle. Raises ValueError if Ray knows no actor of that name (any more)."""
        if name not in self._handles:
            self._handles[name] = self._find(name)
        return self._handles[name]

    def forget(self, name: str) -> None:
        """An actor is gone, or its process is: calls that are under way fail."""
        self._handles.pop(name, None)
        self._absent_until.pop(name, None)
        connection = self._connections.get(name)
        if connection is not None:
            connection.channel.close()

    def call(self, name: str, method: str, *args: Any) -> Awaitable[Any]:
        """Call a method and return what it returns. To be called in the event loop that is the reactor.

        Raises ValueError if Ray knows no actor of that name, and when awaited what Ray raises: `ActorUnavailableError`
        if its process ends meanwhile, `RayTaskError` with the cause's own class for what the method raises.
        """
        connection = self._connection(name)
        answer = None if connection is None else connection.call(method, args)
        return RayPeer(self.handle(name)).call(method, *args) if answer is None else answer

    def post(self, name: str, method: str, *args: Any) -> None:
        """Call a method and forget it. Raises ValueError if Ray knows no actor of that name."""
        connection = self._connection(name)
        if connection is None or not connection.post(method, args):
            RayPeer(self.handle(name)).post(method, *args)

    def peer(self, name: str) -> Peer:
        """Return an actor alone."""
        return _WirePeer(self, name)

    def close(self) -> None:
        """End all connections."""
        for connection in list(self._connections.values()):
            connection.channel.close()

    def _connection(self, name: str) -> _Connection | None:
        """Return the connection to an actor; None if it does not listen on this host."""
        with self._lock:
            connection = self._connections.get(name)
            if connection is not None:
                return connection
            now = time.monotonic()
            if now < self._absent_until.get(name, now):
                return None
            connected = connect(address_of(self._cluster, self._namespace, name))
            if connected is None:
                self._absent_until[name] = now + _ABSENCE_S
                return None
            self._absent_until.pop(name, None)
            connection = self._connections[name] = _Connection(name)
            connection.channel = Channel(
                connected, self._reactor, received=connection.received, closed=self._closed
            )
            return connection

    def _closed(self, channel: Channel) -> None:
        with self._lock:
            ended = [c for c in self._connections.values() if c.channel is channel]
            for connection in ended:
                del self._connections[connection.name]
        for connection in ended:
            connection.fail_calls()


class _WirePeer:
    def __init__(self, wire: Wire, name: str) -> None:
        self._wire = wire
        self._name = name

    def call(self, method: str, *args: Any) -> Awaitable[Any]:
        return self._wire.call(self._name, method, *args)

    def post(self, method: str, *args: Any) -> None:
        self._wire.post(self._name, method, *args)


class _Connection:
    """Owns the calls under way to one process of an actor."""

    channel: Channel

    def __init__(self, name: str) -> None:
        self.name = name
        self._numbers = count(1)
        self._calls: dict[int, tuple[str, asyncio.Future[Any]]] = {}

    def post(self, method: str, args: tuple[Any, ...]) -> bool:
        """Send a message; return False if that is not possible."""
        try:
            return self.channel.send(encode(Post(method=method, args=args)))
        except FrameTooLargeError:
            return False

    def call(self, method: str, args: tuple[Any, ...]) -> asyncio.Future[Any] | None:
        """Send a call and return its answer; None if that is not possible."""
        number = next(self._numbers)
        try:
            frame = encode(Call(number=number, method=method, args=args))
        except FrameTooLargeError:
            return None
        if not self.channel.send(frame):
            return None
        answer = asyncio.get_running_loop().create_future()
        self._calls[number] = (method, answer)
        return answer

    def received(self, channel: Channel, message: Message) -> None:
        """Take an answer."""
        if not isinstance(message, Answer | Failure) or message.number not in self._calls:
            channel.close()
            return
        method, answer = self._calls.pop(message.number)
        if answer.done():
            return  # Nobody waits for it any more.
        if isinstance(message, Answer):
            answer.set_result(message.value)
        else:
            answer.set_exception(self._task_error(method, message))

    def fail_calls(self) -> None:
        """The process at the other end is gone."""
        calls, self._calls = self._calls, {}
        for method, answer in calls.values():
            if not answer.done():
                answer.set_exception(
                    ActorUnavailableError(f"{self.name} ended its connection in {method}", None)
                )

    def _task_error(self, method: str, failure: Failure) -> Exception:
        """Return the error as Ray raises it: of the class of the cause, too."""
        error = RayTaskError(  # type: ignore[no-untyped-call]
            f"{self.name}.{method}",
            failure.traceback,
            failure.error,
            proctitle=self.name,
            ip="this host",
        )
        dual: Exception = error.as_instanceof_cause()  # type: ignore[no-untyped-call]
        return dual
