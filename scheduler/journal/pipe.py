"""How commands reach Redis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from scheduler.journal.resp import Command


class Pipe(Protocol):
    """Sends commands to Redis; belongs to one event loop."""

    async def calls(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands, in this order, and return their answers: bytes, ints, lists of these, None.

        Raises JournalError if Redis cannot be reached, does not answer in time, or refuses one of them.
        """

    async def close(self) -> None:
        """Close all connections."""
