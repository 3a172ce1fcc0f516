"""The connections of one ApiServer: how many there may be, and which one makes room for another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What one connection may take, and how many there may be."""

    max_connections: int = 4096
    max_head_bytes: int = 65_536
    """Most of a request line with its headers, or of trailers, that is kept while their end has not come. What comes
    at once may have a little more."""
    max_pipelined: int = 16
    """Requests that may wait on a connection for the answer to the one before them."""
    client_timeout_s: float = 60.0
    """Longest that a client may take to send a head, and longest that it may leave an answer unread."""
    linger_s: float = 5.0
    """Longest that a connection stays open after its last answer, for a client that still sends or has not read it."""


class Connection(Protocol):
    """What `Connections` knows of a connection."""

    def drop(self) -> None:
        """Close it: no request is being served on it."""


class Connections:
    """Owns which connections of a server are open, and which of those serve no request."""

    def __init__(self, max_connections: int) -> None:
        self._max = max_connections
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # the one that has been idle for longest is first

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Connection) -> bool:
        """Take in a new connection, and return whether there is room. If need be, one that is idle makes room."""
        if len(self._open) >= self._max:
            if not self._idle:
                return False
            longest = next(iter(self._idle))
            self.remove(longest)
            longest.drop()
        self._open.add(connection)
        self._idle[connection] = None
        return True

    def set_busy(self, connection: Connection) -> None:
        """A request is being served on it."""
        self._idle.pop(connection, None)

    def set_idle(self, connection: Connection) -> None:
        """Nothing is being served on it any more."""
        if connection in self._open:
            self._idle[connection] = None

    def remove(self, connection: Connection) -> None:
        """It is closed."""
        self._open.discard(connection)
        self._idle.pop(connection, None)
