"""Makes the journal that a service is configured with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from scheduler.journal.base import Journal
from scheduler.journal.memory import MemoryJournal, MemoryStore
from scheduler.journal.redis_journal import RedisJournal
from scheduler.journal.redis_url import connect

MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalConfig:
    """Where accepted requests are kept, for how long, and what happens if that place cannot be reached."""

    url: str = field(default=MEMORY, repr=False)
    """``memory``, or the URL of a Redis; it may hold a password."""
    ttl_s: float = 86_400.0
    """How long an entry is kept after the last that was written to it."""
    on_failure: Literal["refuse", "continue"] = "refuse"
    """What happens to new requests while the journal cannot be reached."""


def make_journal(config: JournalConfig, *, owner: str, model: str) -> Journal:
    """Return a journal for `owner`, which must be a name that nobody had before. Raises ConfigError."""
    if config.url == MEMORY:
        return MemoryJournal(MemoryStore(config.ttl_s), owner)
    return RedisJournal(connect(config.url), owner, model=model, ttl_s=config.ttl_s)
