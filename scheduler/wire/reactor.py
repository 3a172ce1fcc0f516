"""Who calls a socket's owner once there is something to read, or room to write: an event loop, or a thread."""

from __future__ import annotations

import asyncio
import heapq
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Protocol

_LOG = logging.getLogger(__name__)


class Watched(Protocol):
    """What has a socket."""

    @property
    def socket(self) -> socket.socket:
        """Non-blocking."""

    def readable(self) -> None:
        """There is something to read, or the end of it."""

    def writable(self) -> None:
        """There is room to write."""


class Reactor(Protocol):
    """Calls what it watches, all in one thread."""

    def add(self, watched: Watched) -> None:
        """Say when there is something to read."""

    def await_room(self, watched: Watched) -> None:
        """Call `writable` as soon as there is room, and as long as it does not ask for `room_found`."""

    def room_found(self, watched: Watched) -> None:
        """Call `writable` no more. Only in the reactor's own thread."""

    def close(self, watched: Watched) -> None:
        """Watch a socket no more, and close it."""

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` in the reactor's own thread, after a while."""


class AsyncioReactor:
    """The running event loop. All of it is called in that loop's thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def add(self, watched: Watched) -> None:
        """Say when there is something to read."""
        self._loop.add_reader(watched.socket, watched.readable)

    def await_room(self, watched: Watched) -> None:
        """Call `writable` as soon as there is room."""
        self._loop.add_writer(watched.socket, watched.writable)

    def room_found(self, watched: Watched) -> None:
        """Call `writable` no more."""
        self._loop.remove_writer(watched.socket)

    def close(self, watched: Watched) -> None:
        """Watch a socket no more, and close it."""
        if not self._loop.is_closed():
            self._loop.remove_reader(watched.socket)
            self._loop.remove_writer(watched.socket)
        watched.socket.close()

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` after a while."""
        self._loop.call_later(delay_s, action)


class ThreadReactor:
    """Owns a thread that waits for all its sockets. Any thread may call it."""

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._todo: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, watched: Watched) -> None:
        """Say when there is something to read."""
        self._do(lambda: self._add(watched))

    def await_room(self, watched: Watched) -> None:
        """Call `writable` as soon as there is room."""
        self._do(lambda: self._set_events(watched, selectors.EVENT_READ | selectors.EVENT_WRITE))

    def room_found(self, watched: Watched) -> None:
        """Call `writable` no more."""
        self._set_events(watched, selectors.EVENT_READ)

    def close(self, watched: Watched) -> None:
        """Watch a socket no more, and close it. In the thread: no other socket may have its number before."""
        self._do(lambda: self._close(watched))

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` in the thread, after a while."""
        due = time.monotonic() + delay_s
        self._do(lambda: heapq.heappush(self._timers, (due, next(self._numbers), action)))

    def _do(self, action: Callable[[], None]) -> None:
        self._todo.append(action)
        os.eventfd_write(self._wake_fd, 1)

    def _add(self, watched: Watched) -> None:
        self._selector.register(watched.socket, selectors.EVENT_READ, watched)

    def _set_events(self, watched: Watched, events: int) -> None:
        if watched.socket.fileno() >= 0:
            self._selector.modify(watched.socket, events, watched)

    def _close(self, watched: Watched) -> None:
        if watched.socket.fileno() >= 0:
            self._selector.unregister(watched.socket)
            watched.socket.close()

    def _run(self) -> None:
        while True:
            try:
                self._turn()
            except Exception:
                # One connection's fault must not end all others.
                _LOG.exception("in %s", threading.current_thread().name)

    def _turn(self) -> None:
        timeout_s = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
        for key, events in self._selector.select(timeout_s):
            if key.data is None:
                os.eventfd_read(self._wake_fd)
                continue
            watched: Watched = key.data
            if events & selectors.EVENT_WRITE:
                watched.writable()
            if events & selectors.EVENT_READ:
                watched.readable()
        while self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()
        while self._todo:
            self._todo.popleft()()
