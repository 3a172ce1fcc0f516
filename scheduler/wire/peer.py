"""Another actor, as the callers of its methods see it."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol


class Peer(Protocol):
    """Sends one method call at a time to one actor, whichever way it goes."""

    def call(self, method: str, *args: Any) -> Awaitable[Any]:
        """Call a method and return what it returns. Raises what Ray raises: `RayError` of all kinds."""

    def post(self, method: str, *args: Any) -> None:
        """Call a method and forget it."""


class RayPeer:
    """An actor behind Ray's calls."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def call(self, method: str, *args: Any) -> Awaitable[Any]:
        """Call a method and return what it returns."""
        answer: Awaitable[Any] = getattr(self._handle, method).remote(*args)
        return answer

    def post(self, method: str, *args: Any) -> None:
        """Call a method and forget it."""
        getattr(self._handle, method).remote(*args)
