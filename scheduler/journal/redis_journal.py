"""The journal in Redis 6.2 or newer. Each change of an entry is one script, so it happens whole or not at all.

Keys, all behind `purefill:MODEL:`:

    {ID}           hash     record, fingerprint, state, owner, error
    {ID}:groups    list     what came of it
    open:OWNER     set      ids of the entries that OWNER has not finished; open: those of nobody
    owners         zset     owner, and until when it lives (milliseconds of Redis' own clock)

The two keys of an entry share a hash tag, so that a cluster keeps them together. No command takes keys of two
entries: what is in `open` without an entry, or the other way round, is put right by whoever comes across it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from scheduler.journal.base import Entry, JournalError, Orphan, Write
from scheduler.journal.pipe import Pipe
from scheduler.journal.resp import Command

_ACCEPT = """
local old = redis.call('HMGET', KEYS[1], 'record', 'fingerprint', 'state', 'owner')
if old[1] and old[3] ~= 'failed' and old[1] ~= ARGV[1] then return old end
if not old[1] or old[3] == 'failed' then
  redis.call('DEL', KEYS[1], KEYS[2])
  redis.call('HSET', KEYS[1], 'record', ARGV[1], 'fingerprint', ARGV[2], 'state', 'open', 'owner', ARGV[3])
  redis.call('PEXPIRE', KEYS[1], ARGV[4])
end
return false
"""
_WRITE = """
if redis.call('HGET', KEYS[1], 'owner') ~= ARGV[1] then return 0 end
if ARGV[3] == 'removed' then redis.call('DEL', KEYS[1], KEYS[2]) return 1 end
if ARGV[2] ~= '' then redis.call('RPUSH', KEYS[2], ARGV[2]) end
if ARGV[3] == 'released' then redis.call('HSET', KEYS[1], 'owner', '')
elseif ARGV[3] ~= 'open' then redis.call('HSET', KEYS[1], 'state', ARGV[3], 'error', ARGV[4]) end
redis.call('PEXPIRE', KEYS[1], ARGV[5])
redis.call('PEXPIRE', KEYS[2], ARGV[5])
return 1
"""
_READ = """
local entry = redis.call('HMGET', KEYS[1], 'record', 'fingerprint', 'state', 'owner', 'error')
if not entry[1] then return false end
entry[6] = redis.call('LRANGE', KEYS[2], ARGV[1], -1)
return entry
"""
_TAKE_OVER = """
local entry = redis.call('HMGET', KEYS[1], 'record', 'fingerprint', 'state', 'owner', 'error')
if not entry[1] or entry[3] ~= 'open' then return 0 end
if entry[4] ~= ARGV[1] and entry[4] ~= ARGV[2] then return 1 end
redis.call('HSET', KEYS[1], 'owner', ARGV[2])
entry[4] = ARGV[2]
entry[6] = redis.call('LRANGE', KEYS[2], 0, -1)
return entry
"""
_RENEW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now)
"""

_LOG = logging.getLogger(__name__)


class RedisJournal:
    """A `Journal` for one owner; belongs to one event loop."""

    is_durable = True

    def __init__(self, pipe: Pipe, owner: str, *, model: str, ttl_s: float, lease_s: float = 5.0) -> None:
        """Services share what is named after the same `model`. An owner lives for `lease_s` after each renewal."""
        self._pipe = pipe
        self._owner = owner
        self._prefix = f"purefill:{quote(model, safe='')}:"
        self._ttl_ms = max(1, int(ttl_s * 1000))
        self._lease_s = lease_s
        self._is_up = True
        self._was_down_s: float | None = None
        self._dead: tuple[str, ...] = ()

    @property
    def is_up(self) -> bool:
        """Whether the last call reached it."""
        return self._is_up

    @property
    def renew_every_s(self) -> float:
        """How often `renew` is to be called."""
        return self._lease_s / 5

    async def renew(self) -> None:
        """Live on, and learn whose life has ended. Tries also while everything else is refused."""
        lease_ms = int(self._lease_s * 1000)
        dead = await self._call(
            "EVAL", _RENEW, 1, self._prefix + "owners", self._owner, lease_ms, even_if_down=True
        )
        self._dead = tuple(owner.decode() for owner in dead)

    async def accept(self, entry_id: str, record: bytes, fingerprint: str) -> Entry | None:
        """Make an entry, or return the one that is there."""
        # Into the set first: an entry that is in no set would be taken over by nobody.
        _, old = await self._calls(
            ("SADD", self._open(self._owner), entry_id),
            ("EVAL", _ACCEPT, 2, *self._keys(entry_id), record, fingerprint, self._owner, self._ttl_ms),
        )
        if old is None:
            return None
        entry = _entry([*old, None, []])
        if entry.owner != self._owner or entry.state != "open":
            await self._call("SREM", self._open(self._owner), entry_id)
        return entry

    async def write(self, writes: Sequence[Write]) -> list[str]:
        """Add to entries; return the ids of those that are not this owner's."""
        released = [write.entry_id for write in writes if write.state == "released"]
        commands: list[Command] = [("SADD", self._open(""), *released)] if released else []
        commands += [
            (
                *("EVAL", _WRITE, 2, *self._keys(write.entry_id), self._owner),
                *(write.group, write.state, write.error, self._ttl_ms),
            )
            for write in writes
        ]
        # A Redis that is full takes these alone, and nothing else before it has room again.
        is_removal = all(write.state == "removed" for write in writes)
        answers = (await self._calls(*commands, even_if_down=is_removal))[-len(writes) :] if writes else []
        refused = [write.entry_id for write, written in zip(writes, answers, strict=True) if not written]
        closed = {write.entry_id for write in writes if write.state != "open"}.union(refused)
        if closed:
            await self._call("SREM", self._open(self._owner), *closed)
        return refused

    async def read(self, entry_id: str, first_group: int = 0) -> Entry | None:
        """Return an entry, with its groups from this one on."""
        found = await self._call("EVAL", _READ, 2, *self._keys(entry_id), first_group)
        return None if found is None else _entry(found)

    async def orphans(self, limit: int) -> list[Orphan]:
        """Return up to so many entries that somebody should take over.

        None for a while after Redis was away: owners that live had no way to say so.
        """
        if self._was_down_s is not None and time.monotonic() - self._was_down_s < self._lease_s:
            return []
        owners = ["", *(owner for owner in self._dead if owner != self._owner)]
        found = await self._calls(*(("SRANDMEMBER", self._open(owner), limit) for owner in owners))
        finished = [owner for owner, ids in zip(owners, found, strict=True) if owner and not ids]
        if finished:
            await self._call("ZREM", self._prefix + "owners", *finished)
        pairs = [(owner, entry_id) for owner, ids in zip(owners, found, strict=True) for entry_id in ids]
        return [Orphan(entry_id=entry_id.decode(), owner=owner) for owner, entry_id in pairs[:limit]]

    async def take_over(self, orphan: Orphan) -> Entry | None:
        """Become the owner of an entry and return it, unless it is finished, gone or another's."""
        entry_id = orphan.entry_id
        _, found = await self._calls(
            ("SADD", self._open(self._owner), entry_id),
            ("EVAL", _TAKE_OVER, 2, *self._keys(entry_id), orphan.owner, self._owner),
        )
        is_taken, is_over = isinstance(found, list), found == 0
        # One that is another's may be about to be released by it: then it must be where releases are looked for.
        left = [self._open(orphan.owner)] if is_taken or is_over else []
        left += [] if is_taken else [self._open(self._owner)]
        try:
            await self._calls(*(("SREM", key, entry_id) for key in left))
        except JournalError as error:
            # It is this owner's: should nobody learn that, nobody computes it.
            _LOG.debug("entry %s stays among those of a former owner: %s", entry_id, error)
        return _entry(found) if is_taken else None

    async def close(self) -> None:
        """Live no more, and give the connections back."""
        try:
            await self._call("ZADD", self._prefix + "owners", 0, self._owner)
        except JournalError as error:
            _LOG.warning("the journal does not know that this ApiServer stops: %s", error)
        await self._pipe.close()

    def _keys(self, entry_id: str) -> tuple[str, str]:
        key = f"{self._prefix}{{{entry_id}}}"
        return key, f"{key}:groups"

    def _open(self, owner: str) -> str:
        return f"{self._prefix}open:{owner}"

    async def _call(self, *command: str | int | bytes, even_if_down: bool = False) -> Any:
        """Send a command and return its answer."""
        return (await self._calls(command, even_if_down=even_if_down))[0]

    async def _calls(self, *commands: Command, even_if_down: bool = False) -> list[Any]:
        """Send commands, in this order, and return their answers."""
        if not self._is_up and not even_if_down:
            raise JournalError("the journal cannot be reached")
        try:
            answers = await self._pipe.calls(commands)
        except JournalError as error:
            self._note(error)
            raise JournalError(f"the journal cannot be reached: {error}") from error
        self._note(None)
        return answers

    def _note(self, failure: JournalError | None) -> None:
        """Remember whether the journal could be reached."""
        if failure is not None:
            if self._is_up:
                _LOG.error("the journal cannot be reached: %s", failure)
            self._is_up, self._was_down_s = False, time.monotonic()
        elif not self._is_up:
            _LOG.warning("the journal is back")
            self._is_up = True


def _entry(parts: Sequence[Any]) -> Entry:
    record, fingerprint, state, owner, error, groups = parts
    return Entry(
        record=record,
        fingerprint=fingerprint.decode(),
        state=state.decode(),
        owner=owner.decode(),
        groups=tuple(groups),
        error=(error or b"").decode(),
    )
