"""How rank 0 of a tensor-parallel worker tells the other ranks what to compute.

Everything goes over one connection to each follower, in order, and a connection ends with either process: that is how
each side learns of the other's death. The ranks are processes of one host.
"""

from __future__ import annotations

import os
import queue
import secrets
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from scheduler.errors import ConfigError, WorkerFailedError
from scheduler.messages import PoolHandle

_ACCEPT_TIMEOUT_S = 120.0
"""A follower's process has imported torch within that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where a follower finds its leader."""

    address: str
    """Of a socket in Linux' abstract namespace, which leaves no file behind."""
    key: bytes
    """Without it nobody is let in."""
    store_port: int
    """Of a store of torch.distributed, on this host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBatch:
    """Compute a packed batch. There is no reply."""

    runner: int
    num_tokens: int
    num_slots: int
    finish: str
    words: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrompt:
    """Compute a packed part of one prompt whose tokens are reported. There is no reply."""

    runner: int
    num_tokens: int
    words: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MakePrefill:
    """Make the engine of a prefill worker with these buckets."""

    capture_tokens: tuple[int, ...]
    capture_slots: tuple[int, ...]
    node_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPool:
    """Find the way to a decode worker's pool."""

    handle: PoolHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class UsePool:
    """Capture the graphs that write into the pool that was opened last."""

    decode_worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosePool:
    """Forget a decode worker."""

    decode_worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPages:
    """Copy pages that were written here into a decode worker's."""

    decode_worker: str
    source: tuple[int, ...]
    target: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChooseNumPages:
    """Reply how many pages there is memory for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MakePool:
    """Make the pages of a decode worker, and reply with their handle."""

    num_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareSteps:
    """Capture the steps of a decode worker."""


Command = (
    RunBatch
    | RunPrompt
    | MakePrefill
    | OpenPool
    | UsePool
    | ClosePool
    | CopyPages
    | ChooseNumPages
    | MakePool
    | PrepareSteps
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a follower says to a command."""

    value: Any = None
    error: str | None = None
    """Why it could not do it."""


class Leader:
    """Owns the connections of rank 0 to its followers. For one thread at a time."""

    def __init__(self, store_port: int) -> None:
        """Listen for followers."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        address = f"\0purefill-{os.getpid()}-{secrets.token_hex(8)}"
        self._socket.bind(address)
        self._socket.listen()
        self.meeting = Meeting(address=address, key=secrets.token_bytes(32), store_port=store_port)
        self._connections: list[Connection] = []
        self._replies: list[queue.SimpleQueue[Reply]] = []
        self._is_closed = False

    def accept(self, num_followers: int, on_loss: Callable[[Exception], object]) -> None:
        """Wait for the followers. When one is gone later, a thread calls `on_loss`, unless this was closed first.

        Raises `ConfigError` if they do not come.
        """
        # Here, since it imports Ray, which engines of one process do without.
        from scheduler.wire.address import has_our_user

        self._socket.settimeout(_ACCEPT_TIMEOUT_S)
        while len(self._connections) < num_followers:
            try:
                accepted, _ = self._socket.accept()
            except TimeoutError as error:
                num_missing = num_followers - len(self._connections)
                raise ConfigError(
                    f"tensor_parallel_size: {num_missing} of {num_followers} other ranks did not start "
                    f"within {_ACCEPT_TIMEOUT_S:g} s: is there a GPU for each?"
                ) from error
            if not has_our_user(accepted):
                accepted.close()  # It might say nothing, and be waited for without end.
                continue
            connection = Connection(accepted.detach())
            try:
                deliver_challenge(connection, self.meeting.key)
                answer_challenge(connection, self.meeting.key)
            except (AuthenticationError, EOFError, OSError):
                connection.close()  # It is none of ours.
                continue
            replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
            self._connections.append(connection)
            self._replies.append(replies)
            threading.Thread(
                target=self._listen, args=(connection, replies, on_loss), name="follower", daemon=True
            ).start()

    def tell(self, command: Command) -> None:
        """Send a command to all followers."""
        for connection in self._connections:
            connection.send(command)

    def replies(self) -> list[Any]:
        """Wait for what all followers reply to the oldest command that has a reply.

        Raises `ConfigError` with the reason of the first that could not do it.
        """
        replies = [waiting.get() for waiting in self._replies]
        for reply in replies:
            if reply.error is not None:
                raise ConfigError(reply.error)
        return [reply.value for reply in replies]

    def close(self) -> None:
        """End the connections, and so the followers."""
        self._is_closed = True
        self._socket.close()
        for connection in self._connections:
            # Not closed, since a thread reads from it.
            with socket.socket(fileno=os.dup(connection.fileno())) as ended, suppress(OSError):
                ended.shutdown(socket.SHUT_RDWR)

    def _listen(
        self,
        connection: Connection,
        replies: queue.SimpleQueue[Reply],
        on_loss: Callable[[Exception], object],
    ) -> None:
        try:
            while True:
                replies.put(connection.recv())
        except (EOFError, OSError) as error:
            if not self._is_closed:
                # Whoever computes with it would wait for ever.
                on_loss(WorkerFailedError(f"a rank of the group is gone ({type(error).__name__})"))
            replies.put(Reply(error="a rank of the group is gone"))


def connect(meeting: Meeting) -> Connection:
    """Return a follower's connection to its leader. Raises `OSError` or `AuthenticationError` if there is none."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.connect(meeting.address)
    connection = Connection(client.detach())
    answer_challenge(connection, meeting.key)
    deliver_challenge(connection, meeting.key)
    return connection


@contextmanager
def together(leader: Leader | None, command: Command) -> Iterator[list[Any]]:
    """Let followers do as a command says while the block does the same here; yields their replies once it ended.

    Raises `ConfigError` with the reason of one that could not. Without a leader there is only the block.
    """
    replies: list[Any] = []
    if leader is not None:
        leader.tell(command)
    try:
        yield replies
    except ConfigError:
        if leader is not None:
            with suppress(ConfigError):  # Theirs is most likely the same.
                leader.replies()
        raise
    if leader is not None:
        replies += leader.replies()


def end_with_leader(connection: Connection) -> None:
    """Let a thread end this process when the leader's end of a connection is gone, whatever it is at."""

    def wait() -> None:
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLRDHUP)
        poll.poll()
        os._exit(0)

    threading.Thread(target=wait, name="leader", daemon=True).start()
