"""What a journal is. It stores bytes and knows nothing of what they say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from scheduler.errors import PurefillError

EntryState = Literal["open", "done", "failed"]
WriteState = Literal["open", "done", "failed", "released", "removed"]


class JournalError(PurefillError):
    """The journal cannot be reached, or did not answer in time."""

    label = "journal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What the journal holds of one accepted request."""

    record: bytes
    """What was accepted."""
    fingerprint: str
    """Of the body that the client sent."""
    state: EntryState
    owner: str
    """Who computes it; empty: nobody, at the moment."""
    groups: tuple[bytes, ...] = ()
    """What came of it so far, in the order in which it was written; one may be there twice."""
    error: str = ""
    """Why it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """What an owner adds to one of its entries."""

    entry_id: str
    group: bytes = b""
    """Empty: nothing new."""
    state: WriteState = "open"
    """``released``: somebody else shall go on with it. ``removed``: nobody will ask for it."""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """An entry that is not finished, and whose owner does not live."""

    entry_id: str
    owner: str
    """Who had it; empty if it was released."""


class Journal(Protocol):
    """Entries by their ids, each written by one owner at a time.

    An owner lives while it calls `renew` often enough. What one writes to an entry that another has taken over is
    refused. Entries are kept for a time limit after the last write. Each call may be repeated. All that ask the
    journal raise JournalError if it cannot be reached, within about two seconds.
    """

    is_durable: bool
    """Whether it outlives this process."""

    @property
    def is_up(self) -> bool:
        """Whether the last call reached it."""

    @property
    def renew_every_s(self) -> float:
        """How often `renew` is to be called."""

    async def renew(self) -> None:
        """Live on. Must be called before anything else, and again and again."""

    async def accept(self, entry_id: str, record: bytes, fingerprint: str) -> Entry | None:
        """Make an entry and return None; if there is one that has not failed, return it without its groups."""

    async def write(self, writes: Sequence[Write]) -> list[str]:
        """Add to entries. Returns the ids of those that are not this owner's (any more); they stay as they are.

        Entries that are only removed are tried to be even while the journal is away: it may be full.
        """

    async def read(self, entry_id: str, first_group: int = 0) -> Entry | None:
        """Return an entry, with its groups from this one on."""

    async def orphans(self, limit: int) -> list[Orphan]:
        """Return up to so many entries that somebody should take over."""

    async def take_over(self, orphan: Orphan) -> Entry | None:
        """Become the owner of an entry and return it; None if it is finished, gone or another's in the meantime."""

    async def close(self) -> None:
        """Live no more: others may take over what is not finished. Raises nothing."""
