"""Makes the journal that a service is configured with."""

from __future__ import annotations

from scheduler.journal.base import Journal
from scheduler.journal.memory import MemoryJournal, MemoryStore
from scheduler.journal.settings import MEMORY, JournalConfig


def make_journal(config: JournalConfig, *, owner: str, model: str) -> Journal:
    """Return a journal for `owner`, which must be a name that nobody had before. Raises ConfigError."""
    if config.url == MEMORY:
        return MemoryJournal(MemoryStore(config.ttl_s), owner)
    # The client of Redis takes a while to import, and most services have no use for it.
    from scheduler.journal.redis_journal import RedisJournal
    from scheduler.journal.redis_url import connect

    return RedisJournal(connect(config.url), owner, model=model, ttl_s=config.ttl_s)
