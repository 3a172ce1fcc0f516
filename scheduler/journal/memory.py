"""The journal in this process's memory: it lets clients repeat a request, and survives nothing."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from scheduler.journal.base import Entry, EntryState, Orphan, Write

_MAX_BYTES = 256 * 2**20


@dataclass(slots=True, kw_only=True)
class _Slot:
    record: bytes
    fingerprint: str
    owner: str
    touched_s: float
    state: EntryState = "open"
    groups: list[bytes] = field(default_factory=list)
    error: str = ""

    @property
    def size_bytes(self) -> int:
        return len(self.record) + sum(map(len, self.groups))


class MemoryStore:
    """Owns the entries, those that were touched last at the end. Several journals may share it."""

    def __init__(self, ttl_s: float, *, max_bytes: int = _MAX_BYTES) -> None:
        """Entries live for `ttl_s` after the last write; beyond `max_bytes` the oldest finished ones go earlier."""
        self.ttl_s = ttl_s
        self.slots: OrderedDict[str, _Slot] = OrderedDict()
        self.open_ids: dict[str, None] = {}
        """Of entries that are not finished, the oldest first."""
        self.alive_until_s: dict[str, float] = {}
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def put(self, entry_id: str, slot: _Slot, now: float) -> None:
        """Keep a new entry."""
        self.drop(entry_id)
        self.slots[entry_id] = slot
        self.open_ids[entry_id] = None
        self._num_bytes += slot.size_bytes
        self._make_room(now)

    def get(self, entry_id: str, now: float) -> _Slot | None:
        """Return an entry that has not expired."""
        slot = self.slots.get(entry_id)
        if slot is not None and now - slot.touched_s >= self.ttl_s:
            self.drop(entry_id)
            return None
        return slot

    def add(self, entry_id: str, group: bytes, now: float) -> None:
        """Add to an entry that is there."""
        slot = self.slots[entry_id]
        if group:
            slot.groups.append(group)
            self._num_bytes += len(group)
        slot.touched_s = now
        self.slots.move_to_end(entry_id)

    def finish(self, entry_id: str, state: EntryState, error: str) -> None:
        """End an entry that is there."""
        slot = self.slots[entry_id]
        slot.state, slot.error = state, error
        self.open_ids.pop(entry_id, None)

    def drop(self, entry_id: str) -> None:
        """Forget an entry, if it is there."""
        self.open_ids.pop(entry_id, None)
        slot = self.slots.pop(entry_id, None)
        if slot is not None:
            self._num_bytes -= slot.size_bytes

    def _make_room(self, now: float) -> None:
        while self.slots and now - next(iter(self.slots.values())).touched_s >= self.ttl_s:
            self.drop(next(iter(self.slots)))
        if self._num_bytes > self._max_bytes:
            for entry_id in [i for i, slot in self.slots.items() if slot.state != "open"]:
                if self._num_bytes <= self._max_bytes:
                    break
                self.drop(entry_id)


class MemoryJournal:
    """A `Journal` for one owner."""

    is_durable = False

    def __init__(
        self,
        store: MemoryStore,
        owner: str,
        *,
        lease_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """An owner lives for `lease_s` after each renewal."""
        self._store = store
        self._owner = owner
        self._lease_s = lease_s
        self._clock = clock

    @property
    def is_up(self) -> bool:
        """It always is."""
        return True

    @property
    def renew_every_s(self) -> float:
        """How often `renew` is to be called."""
        return self._lease_s / 5

    async def renew(self) -> None:
        """Live on."""
        self._store.alive_until_s[self._owner] = self._clock() + self._lease_s

    async def accept(self, entry_id: str, record: bytes, fingerprint: str) -> Entry | None:
        """Make an entry, or return the one that is there."""
        now = self._clock()
        slot = self._store.get(entry_id, now)
        if slot is not None and slot.state != "failed" and slot.record != record:
            return replace(_entry(slot, 0), groups=())
        if slot is None or slot.state == "failed":
            new = _Slot(record=record, fingerprint=fingerprint, owner=self._owner, touched_s=now)
            self._store.put(entry_id, new, now)
        return None

    async def write(self, writes: Sequence[Write]) -> list[str]:
        """Add to entries; return the ids of those that are not this owner's."""
        now, refused = self._clock(), []
        for write in writes:
            slot = self._store.get(write.entry_id, now)
            if slot is None or slot.owner != self._owner:
                refused.append(write.entry_id)
                continue
            self._store.add(write.entry_id, write.group, now)
            match write.state:
                case "removed":
                    self._store.drop(write.entry_id)
                case "released":
                    slot.owner = ""
                case "done" | "failed":
                    self._store.finish(write.entry_id, write.state, write.error)
        return refused

    async def read(self, entry_id: str, first_group: int = 0) -> Entry | None:
        """Return an entry, with its groups from this one on."""
        slot = self._store.get(entry_id, self._clock())
        return None if slot is None else _entry(slot, first_group)

    async def orphans(self, limit: int) -> list[Orphan]:
        """Return up to so many entries that somebody should take over."""
        now, found = self._clock(), list[Orphan]()
        for entry_id in self._store.open_ids:
            if len(found) == limit:
                break
            slot = self._store.slots[entry_id]
            if slot.owner != self._owner and self._store.alive_until_s.get(slot.owner, 0.0) <= now:
                found.append(Orphan(entry_id=entry_id, owner=slot.owner))
        return found

    async def take_over(self, orphan: Orphan) -> Entry | None:
        """Become the owner of an entry and return it, unless it is finished, gone or another's."""
        slot = self._store.get(orphan.entry_id, self._clock())
        if slot is None or slot.state != "open" or slot.owner not in (orphan.owner, self._owner):
            return None
        slot.owner = self._owner
        return _entry(slot, 0)

    async def close(self) -> None:
        """Live no more."""
        self._store.alive_until_s.pop(self._owner, None)


def _entry(slot: _Slot, first_group: int) -> Entry:
    return Entry(
        record=slot.record,
        fingerprint=slot.fingerprint,
        state=slot.state,
        owner=slot.owner,
        groups=tuple(slot.groups[first_group:]),
        error=slot.error,
    )
