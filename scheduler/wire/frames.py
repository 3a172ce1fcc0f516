"""What travels on a connection: a length of four bytes, then one pickled message."""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from typing import Any

from scheduler.wire.pickling import dumps

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""Of one message. The longest prompts of a whole batch are a tenth of it."""

_LENGTH = struct.Struct(">I")


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """Call a method; nobody waits for what it returns."""

    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Call a method, and answer with what it returns."""

    number: int
    """Counts the calls of a connection."""
    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a call returned."""

    number: int
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What a call raised."""

    number: int
    error: Exception
    traceback: str


Message = Post | Call | Answer | Failure


class FrameTooLargeError(ValueError):
    """A message is larger than a frame may be."""


class BrokenFrameError(ValueError):
    """What came is no frame."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.messages: list[Message] = []
        """Those that were complete before it, and have not been returned."""


def encode(message: Message) -> bytes:
    """Return a message as a frame. Raises `FrameTooLargeError`, or whatever pickle raises for what it cannot take."""
    body = dumps(message)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameTooLargeError(f"a message must have <= {MAX_FRAME_BYTES} bytes, got {len(body)}")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Owns what has come of frames that are not complete."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Take in bytes and return the messages that are complete with them. Raises `BrokenFrameError`."""
        self._buffer += data
        messages: list[Message] = []
        try:
            self._take(messages)
        except BrokenFrameError as error:
            error.messages = messages
            raise
        return messages

    def _take(self, messages: list[Message]) -> None:
        start = 0
        with memoryview(self._buffer) as view:
            while len(view) - start >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(view, start)
                if size > MAX_FRAME_BYTES:
                    raise BrokenFrameError(f"a frame must have <= {MAX_FRAME_BYTES} bytes, got {size}")
                end = start + _LENGTH.size + size
                if end > len(view):
                    break
                messages.append(_decode(view[start + _LENGTH.size : end]))
                start = end
        del self._buffer[:start]


def _decode(body: memoryview) -> Message:
    try:
        # The peer has this process's user, and Ray runs what it is sent by such a one: see docs/security.md.
        message = pickle.loads(body)
    except Exception as error:
        raise BrokenFrameError(f"a frame cannot be read: {type(error).__name__}: {error}") from error
    finally:
        body.release()
    if not isinstance(message, Post | Call | Answer | Failure):
        raise BrokenFrameError(f"a frame must hold a message, got {type(message).__name__}")
    return message
