"""The end at which an actor takes messages from others of its host."""

from __future__ import annotations

import asyncio
import inspect
import logging
import pickle
import socket
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from scheduler.messages import RAY_NAMESPACE
from scheduler.wire.address import address_of, cluster_address, has_our_user, listen
from scheduler.wire.channel import Channel
from scheduler.wire.frames import Answer, Call, Failure, Message, Post, encode
from scheduler.wire.reactor import Reactor

_LOG = logging.getLogger(__name__)

_RETRY_S = 0.5
"""Between attempts to listen at an address that another process has."""

Method = Callable[..., Any]
"""Called by the reactor, so it must not wait. Returns what it has to say, or a future or a coroutine of that."""


class WireServer:
    """Owns the address of an actor and the connections to it."""

    def __init__(self, address: str, reactor: Reactor, methods: Mapping[str, Method]) -> None:
        """Let others call `methods`, by name, as soon as the address is free: that is when a former process is gone.

        Until then they use Ray.
        """
        self._address = address
        self._reactor = reactor
        self._methods = methods
        self._channels: set[Channel] = set()
        self._tasks: set[asyncio.Future[Any]] = set()
        self._listener: _Listener | None = None
        self._is_closed = False
        self._has_warned = False
        self._listen()

    @property
    def is_listening(self) -> bool:
        """Whether others can connect."""
        return self._listener is not None

    def close(self) -> None:
        """Listen no more, and end all connections."""
        self._is_closed = True
        self._stop_listening()
        for channel in list(self._channels):
            channel.close()

    def _listen(self) -> None:
        if self._is_closed:
            return
        try:
            self._listener = _Listener(listen(self._address), self._accept)
        except OSError:
            self._reactor.later(_RETRY_S, self._listen)
        else:
            self._reactor.add(self._listener)

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            self._reactor.close(listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # There may be too many open files: asked again at once, it would say the same.
            _LOG.error("a connection of another actor cannot be accepted: %s", error)
            self._stop_listening()
            self._reactor.later(_RETRY_S, self._listen)
            return
        if not has_our_user(connection):
            # Once: whoever it is could fill the log.
            if not self._has_warned:
                _LOG.warning("connections of another user are closed")
                self._has_warned = True
            connection.close()
            return
        connection.setblocking(False)
        self._channels.add(
            Channel(connection, self._reactor, received=self._received, closed=self._channels.discard)
        )

    def _received(self, channel: Channel, message: Message) -> None:
        if not isinstance(message, Post | Call):
            _LOG.error("a connection is closed: it brought an answer to nothing")
            channel.close()
            return
        try:
            result = self._methods[message.method](*message.args)
        except Exception as error:
            self._finish(channel, message, error)
            return
        if inspect.iscoroutine(result):
            result = asyncio.ensure_future(result)
        if isinstance(result, asyncio.Future):
            # asyncio itself keeps no reference to a running task.
            self._tasks.add(result)
            result.add_done_callback(self._tasks.discard)
        if isinstance(result, asyncio.Future | Future):
            result.add_done_callback(lambda done: self._finish_with(channel, message, done))
        else:
            self._finish(channel, message, result)

    def _finish_with(
        self, channel: Channel, message: Post | Call, done: asyncio.Future[Any] | Future[Any]
    ) -> None:
        if done.cancelled():
            self._finish(channel, message, RuntimeError(f"{message.method} was cancelled"))
        else:
            error = done.exception()
            self._finish(channel, message, done.result() if error is None else error)

    def _finish(self, channel: Channel, message: Post | Call, result: Any) -> None:
        """Answer a call with what became of it."""
        if isinstance(result, BaseException):
            _LOG.error("%s failed", message.method, exc_info=result)
        if isinstance(message, Call):
            # As many answers can wait as the peer has calls under way.
            channel.send(_answer(message.number, result), is_bounded=False)


def serve_actor(
    name: str, reactor: Reactor, methods: Mapping[str, Method], *, namespace: str = RAY_NAMESPACE
) -> WireServer:
    """Let others on this host call methods of the actor of this process, which has that name in its cluster."""
    return WireServer(address_of(cluster_address(), namespace, name), reactor, methods)


def _answer(number: int, result: Any) -> bytes:
    if not isinstance(result, BaseException):
        try:
            return encode(Answer(number=number, value=result))
        except Exception as error:  # too large, or not to be pickled
            result = error
    said = "".join(traceback.format_exception(result))
    return encode(Failure(number=number, error=_portable(result), traceback=said))


def _portable(error: BaseException) -> Exception:
    """Return an error that another process can read: this one if it can."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = None
    return (
        error if isinstance(copy, Exception) and isinstance(error, Exception) else RuntimeError(repr(error))
    )


class _Listener:
    def __init__(self, listener: socket.socket, accept: Callable[[socket.socket], None]) -> None:
        self.socket = listener
        self._accept = accept

    def readable(self) -> None:
        self._accept(self.socket)

    def writable(self) -> None:
        raise AssertionError("nothing is written to a listener")
