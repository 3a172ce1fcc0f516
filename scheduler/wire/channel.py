"""One connection: messages out without ever waiting, and messages in."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable

from scheduler.wire.frames import BrokenFrameError, FrameReader, Message
from scheduler.wire.reactor import Reactor

_LOG = logging.getLogger(__name__)

MAX_BACKLOG_BYTES = 8 * 1024 * 1024
"""What may wait for a peer that does not read, beside what the kernel holds (some 200 KiB)."""
_READ_BYTES = 256 * 1024


class Channel:
    """Owns a connected socket, and what is still to be written to it. Any thread may send."""

    def __init__(
        self,
        connection: socket.socket,
        reactor: Reactor,
        *,
        received: Callable[[Channel, Message], None],
        closed: Callable[[Channel], None],
    ) -> None:
        """`received` and `closed` are called by the reactor: of each message that comes, and once at the end."""
        self.socket = connection
        self._reactor = reactor
        self._received = received
        self._closed = closed
        self._reader = FrameReader()
        self._lock = threading.Lock()
        self._backlog = bytearray()
        self._is_open = True
        reactor.add(self)

    def send(self, frame: bytes, *, is_bounded: bool = True) -> bool:
        """Take a frame to be written; return False, with nothing of it taken, if that is not possible.

        The peer is gone, or it does not read and so much waits for it already, unless not `is_bounded`.
        """
        with self._lock:
            if not self._is_open:
                return False
            if self._backlog:
                if is_bounded and len(self._backlog) + len(frame) > MAX_BACKLOG_BYTES:
                    return False
                self._backlog += frame
                return True
            try:
                num_written = self.socket.send(frame)
            except BlockingIOError:
                num_written = 0
            except OSError:
                return False  # The reactor reads the end of it.
            if num_written < len(frame):
                self._backlog += frame[num_written:]
                self._reactor.await_room(self)
            return True

    def close(self) -> None:
        """End the connection. What was not written is lost, as it is with a process that ends."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            self._backlog.clear()
        self._reactor.close(self)
        self._closed(self)

    def writable(self) -> None:
        """Write what waits."""
        with self._lock:
            if not self._is_open:
                return
            try:
                del self._backlog[: self.socket.send(self._backlog)]
            except BlockingIOError:
                return
            except OSError:
                self._backlog.clear()  # The reactor reads the end of it.
            if not self._backlog:
                self._reactor.room_found(self)

    def readable(self) -> None:
        """Read what has come."""
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        broken: BrokenFrameError | None = None
        try:
            messages = self._reader.feed(data)
        except BrokenFrameError as error:
            broken, messages = error, error.messages
        for message in messages:
            self._received(self, message)
        if broken is not None:
            _LOG.error("a connection is closed: %s", broken)
            self.close()
