"""Writes what comes of requests into the journal, in groups."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from weakref import WeakValueDictionary

from scheduler.api.records import encode_error, encode_events
from scheduler.errors import RequestError, UnavailableError
from scheduler.journal.base import Journal, JournalError, Write, WriteState
from scheduler.messages import TokenEvent

_LOG = logging.getLogger(__name__)


class Recording:
    """What came of one request and is not in the journal yet. A `Tap` of its stream."""

    def __init__(self, entry_id: str, *, is_keyed: bool, touch: Callable[[Recording], None]) -> None:
        """`touch` is called when there is something to write, of a recording that had nothing."""
        self.entry_id = entry_id
        self.is_keyed = is_keyed
        self.state: WriteState = "open"
        self.since_s: float | None = None
        """When what is to be written first came, in the event loop's time; None: there is nothing."""
        self._events: list[tuple[int, TokenEvent]] = []
        self._error = ""
        self._touch = touch

    def took(self, position: int, event: TokenEvent) -> None:
        """Record an event, if the client may come back for it: the others' are computed again, should all die."""
        if self.is_keyed and self.state == "open":
            self._events.append((position, event))
            self._changed()

    def failed(self, error: RequestError) -> None:
        """Record an error. If it is not the request's own, somebody shall go on with it."""
        if isinstance(error, UnavailableError):
            self._end("released")
        else:
            self._error = encode_error(error)
            self._end("failed")

    def complete(self) -> None:
        """All choices are complete. Nobody comes back for a result whose client did not choose the key."""
        self._end("done" if self.is_keyed else "removed")

    def remove(self) -> None:
        """Nobody wants the result."""
        self._end("removed")

    def next_write(self) -> tuple[Write, int]:
        """Return what is to be written, and how many events that are."""
        events = [] if self.state == "removed" else self._events
        group = encode_events(events) if events else b""
        write = Write(entry_id=self.entry_id, group=group, state=self.state, error=self._error)
        return write, len(events)

    def written(self, write: Write, num_events: int) -> bool:
        """This is in the journal, with so many events. Returns whether there is nothing else to write by now."""
        del self._events[:num_events]
        is_all = write.state == self.state and (self.state == "removed" or not self._events)
        self.since_s = None if is_all else asyncio.get_running_loop().time()
        return is_all

    def _end(self, state: WriteState) -> None:
        if self.state == "open":
            self.state = state
            self._changed()

    def _changed(self) -> None:
        if self.since_s is None:
            self.since_s = asyncio.get_running_loop().time()
            self._touch(self)


class Recorder:
    """Owns the recordings that have something to write. Belongs to one event loop.

    While the journal is away they wait; there are not more of them than of requests that were accepted before.
    """

    def __init__(self, journal: Journal, group_s: float) -> None:
        """`group_s`: how long tokens wait for others to be written with them."""
        self._journal = journal
        self._group_s = group_s
        self._dirty: dict[str, Recording] = {}
        self._alive: WeakValueDictionary[str, Recording] = WeakValueDictionary()
        """Those that somebody has, by entry: of requests that are computed, or wait to be written."""
        self._timer: asyncio.TimerHandle | None = None
        self._flushing: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()

    def record(self, entry_id: str, *, is_keyed: bool) -> Recording:
        """Return a recording for an entry that is this owner's."""
        recording = Recording(entry_id, is_keyed=is_keyed, touch=self._touch)
        self._alive[entry_id] = recording
        return recording

    def give_up(self, entry_id: str, *, is_keyed: bool) -> None:
        """Remove an entry that may have been made, unless it is another request's that was first with its key."""
        first = self._alive.get(entry_id)
        if first is None or first.state in ("failed", "removed"):
            self.record(entry_id, is_keyed=is_keyed).remove()

    @property
    def lag_s(self) -> float:
        """How long the oldest event waits that is to be written."""
        waiting = [r.since_s for r in self._dirty.values() if r.since_s is not None]
        return asyncio.get_running_loop().time() - min(waiting) if waiting else 0.0

    async def flush(self) -> None:
        """Write everything that waits now. Raises JournalError; then it waits on."""
        await self._write()

    async def make_room(self) -> None:
        """Remove the entries that nobody wants. Raises JournalError; then they wait on."""
        await self._write_these([r for r in self._dirty.values() if r.state == "removed"])

    async def settle(self, entry_id: str) -> None:
        """Write what waits for an entry, so that it meets none that takes its place. Raises JournalError."""
        if entry_id in self._dirty:
            await self.flush()

    def _touch(self, recording: Recording) -> None:
        self._dirty[recording.entry_id] = recording
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._group_s, self._begin)

    def _begin(self) -> None:
        self._timer = None
        if self._journal.is_up and self._flushing is None:
            self._flushing = asyncio.create_task(self._write_in_background())
        else:
            self._timer = asyncio.get_running_loop().call_later(self._group_s, self._begin)

    async def _write_in_background(self) -> None:
        try:
            await self._write()
        except JournalError as error:
            _LOG.debug("tokens wait for the journal: %s", error)
        finally:
            self._flushing = None
            if self._dirty and self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(self._group_s, self._begin)

    async def _write(self) -> None:
        async with self._writing:
            await self._write_these(self._dirty.values())

    async def _write_these(self, recordings: Iterable[Recording]) -> None:
        batch = [(recording, *recording.next_write()) for recording in recordings]
        if not batch:
            return
        refused = set(await self._journal.write([write for _, write, _ in batch]))
        for recording, write, num_events in batch:
            if recording.entry_id in refused:
                # It expired, or somebody who took this ApiServer for dead goes on with it.
                _LOG.warning("the journal's entry %s is not ours any more", recording.entry_id)
                recording.remove()
                self._forget(recording)
                continue
            if recording.written(write, num_events):
                self._forget(recording)

    def _forget(self, recording: Recording) -> None:
        # An entry that was released may have come back meanwhile, with a recording of its own.
        if self._dirty.get(recording.entry_id) is recording:
            del self._dirty[recording.entry_id]
