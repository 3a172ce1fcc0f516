"""One ApiServer and its journal: what it accepted is written there, and read there by who asks again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Literal, Protocol

from scheduler.api.computation import EngineComputation
from scheduler.api.engine import Engine, TokenStream
from scheduler.api.follower import Follower
from scheduler.api.idempotency import KEY_HEADER, Ticket
from scheduler.api.recorder import Recorder, Recording
from scheduler.api.records import (
    AcceptedRequest,
    RecordError,
    decode_accepted,
    decode_events,
    encode_accepted,
)
from scheduler.errors import (
    IdempotencyKeyError,
    OverloadedError,
    RequestError,
    UnavailableError,
    WorkerFailedError,
)
from scheduler.journal.base import Entry, Journal, JournalError, Orphan, Write
from scheduler.messages import JournalStatus, TokenEvent

_MAX_ADOPTED = 256
"""Requests of others that are computed at once; the rest waits for the next round."""
_STOP_TIMEOUT_S = 2.0
_START_PAUSE_S = 0.2
_COMPANY_S = 0.005
"""How long a request waits for others to be written with it, while the scheduler looks at it and the batch forms."""

_LOG = logging.getLogger(__name__)


class Resume(Protocol):
    """Goes on with a request that somebody else began."""

    def __call__(
        self,
        accepted: AcceptedRequest,
        events: Sequence[tuple[int, TokenEvent]],
        recording: Recording,
    ) -> Awaitable[Callable[[], Awaitable[None]]]:
        """Submit what is not complete after `events`, and return what waits for the rest.

        Raises RequestError if the engine does not accept it.
        """


class Journaling:
    """Owns the journal's side of all requests of an ApiServer. Belongs to one event loop."""

    def __init__(
        self,
        journal: Journal,
        *,
        on_failure: Literal["refuse", "continue"] = "refuse",
        group_s: float = 0.25,
    ) -> None:
        """`on_failure`: what becomes of new requests while the journal is away.

        `group_s`: how long tokens wait for others to be written with them.
        """
        self._journal = journal
        self._recorder = Recorder(journal, group_s)
        self._refuses = on_failure == "refuse"
        self._num_unjournaled = 0
        self._resume: Resume | None = None
        self._running: list[asyncio.Task[None]] = []
        self._background: set[asyncio.Task[None]] = set()
        self._unreadable: set[str] = set()
        self._adopted: set[str] = set()
        self._departure: asyncio.Event | None = None
        self._adopts = True

    @property
    def is_durable(self) -> bool:
        """Whether requests are written down whose clients did not choose a key."""
        return self._journal.is_durable

    @property
    def state(self) -> Literal["memory", "up", "down"]:
        """What `/ready` says."""
        return ("up" if self._journal.is_up else "down") if self.is_durable else "memory"

    def status(self) -> JournalStatus:
        """Return how the journal does."""
        return JournalStatus(
            is_up=self._journal.is_up,
            lag_s=self._recorder.lag_s,
            num_unjournaled=self._num_unjournaled,
        )

    def check_ready(self) -> None:
        """Raise UnavailableError if new requests are refused."""
        if self._refuses and not self._journal.is_up:
            raise _away()

    def resume_with(self, resume: Resume) -> None:
        """Say how requests are gone on with that others began."""
        self._resume = resume

    async def start(self, *, patience_s: float = 0.0) -> None:
        """Join the journal. Raises JournalError if it cannot be reached and new requests would be refused.

        `patience_s`: how long it may take to come up.
        """
        give_up_s = asyncio.get_running_loop().time() + patience_s
        while self._refuses:
            try:
                await self._journal.renew()
                break
            except JournalError:
                if asyncio.get_running_loop().time() >= give_up_s:
                    raise
            await asyncio.sleep(_START_PAUSE_S)
        # Apart: what is taken over waits for the scheduler, and meanwhile this ApiServer lives on.
        self._running = [
            asyncio.create_task(self._again_and_again(work)) for work in (self._live, self._adopt)
        ]

    def adopt_no_more(self) -> None:
        """Take over nothing of others any more: this ApiServer is about to stop."""
        self._adopts = False

    async def stop(self) -> None:
        """Write what waits, and leave what is not finished to others. Takes two seconds at most."""
        for task in self._running:
            task.cancel()
        if self._background:
            await asyncio.wait(self._background, timeout=_STOP_TIMEOUT_S / 2)
        with suppress(JournalError, TimeoutError):
            async with asyncio.timeout(_STOP_TIMEOUT_S / 2):
                await self._recorder.flush()
        await self._journal.close()

    async def find(self, ticket: Ticket) -> tuple[AcceptedRequest, Follower] | None:
        """Return what is known by the ticket's key, and what comes of it; None if it has to be computed.

        Raises IdempotencyKeyError if the key came with another request, and UnavailableError.
        """
        try:
            await self._recorder.settle(ticket.entry_id)
            entry = await self._journal.read(ticket.entry_id)
        except JournalError as error:
            if self._refuses:
                raise _away() from error
            return None  # Whether it can be written down is seen when that is tried.
        return None if entry is None or entry.state == "failed" else self._follow(ticket, entry)

    async def accept(
        self, ticket: Ticket, accepted: AcceptedRequest
    ) -> Recording | tuple[AcceptedRequest, Follower] | None:
        """Write a request down, before its answer begins. None: it goes on without the journal.

        If another with the same key was first, what comes of that is returned. Raises as `find`. Requests without
        a key of their clients' are written together with others that come within some milliseconds.
        """
        if not ticket.is_keyed:
            await self._company()
        was_up = self._journal.is_up
        try:
            await self._recorder.settle(ticket.entry_id)
            entry = await self._journal.accept(ticket.entry_id, encode_accepted(accepted), ticket.fingerprint)
        except JournalError as error:
            if was_up:
                # It may be there all the same; whoever asks again would wait for what nobody computes.
                self._recorder.give_up(ticket.entry_id, is_keyed=ticket.is_keyed)
            if self._refuses:
                raise _away() from error
            self._num_unjournaled += 1
            return None
        if entry is not None:
            return self._follow(ticket, entry)
        return self._recorder.record(ticket.entry_id, is_keyed=ticket.is_keyed)

    async def withdraw(self, accepting: Awaitable[Recording | object]) -> None:
        """Forget a request that the engine did not accept while it was being written down."""
        with suppress(RequestError):
            noted = await accepting
            if isinstance(noted, Recording):
                await self.refuse(noted)

    async def refuse(self, recording: Recording) -> None:
        """Forget a request that the engine did not accept, before its client hears of it."""
        try:
            await self._journal.write([Write(entry_id=recording.entry_id, state="removed")])
        except JournalError:
            recording.remove()

    def compute(
        self,
        engine: Engine,
        request_ids: Sequence[str],
        stream: TokenStream,
        recording: Recording,
        positions: Sequence[int],
    ) -> RecordedComputation:
        """Return a computation whose tokens are recorded. `positions`: the choices that were submitted."""
        stream.attach(recording, positions)
        return RecordedComputation(engine, request_ids, stream, recording, self._spawn)

    async def _company(self) -> None:
        """Wait until it is time to write, for all who wait at once."""
        if self._departure is None:
            self._departure = asyncio.Event()
            asyncio.get_running_loop().call_later(_COMPANY_S, self._depart)
        await self._departure.wait()

    def _depart(self) -> None:
        departure, self._departure = self._departure, None
        if departure is not None:
            departure.set()

    def _follow(self, ticket: Ticket, entry: Entry) -> tuple[AcceptedRequest, Follower]:
        if entry.fingerprint != ticket.fingerprint:
            raise IdempotencyKeyError(
                f"{KEY_HEADER} {ticket.key} came before, with another body or path; a new request needs a new key",
                param=KEY_HEADER,
            )
        try:
            accepted = decode_accepted(entry.record)
        except RecordError as error:
            raise UnavailableError(str(error), param=KEY_HEADER) from error
        return accepted, Follower(self._journal, ticket.entry_id, len(accepted.samplings))

    async def _again_and_again(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do something as often as the journal wants it. Never returns."""
        while True:
            try:
                await work()
            except JournalError as error:
                _LOG.debug("no round: %s", error)
            except Exception:
                _LOG.exception("a round over the journal failed")
            await asyncio.sleep(self._journal.renew_every_s)

    async def _live(self) -> None:
        """Say that this ApiServer lives."""
        try:
            await self._journal.renew()
        except JournalError:
            # A journal that is full would stay so: nothing is written to it while it counts as away.
            await self._recorder.make_room()
            raise

    async def _adopt(self) -> None:
        """Take over what others left."""
        room = _MAX_ADOPTED - len(self._background)
        if self._resume is None or room <= 0 or not self._adopts:
            return
        for orphan in await self._journal.orphans(room):
            # One that is computed here may still be among those of its former owner.
            if orphan.entry_id in self._unreadable or orphan.entry_id in self._adopted:
                continue
            if not await self._adopt_one(orphan, self._resume):
                return

    async def _adopt_one(self, orphan: Orphan, resume: Resume) -> bool:
        """Go on with a request that nobody computes; return False if there is no room for it now."""
        seen = await self._journal.read(orphan.entry_id)
        if seen is not None and not self._can_read(orphan.entry_id, seen):
            return True
        entry = await self._journal.take_over(orphan)
        if entry is None:
            return True
        # Whoever comes back for it, be it with a key of ours, has no other way to its result.
        recording = self._recorder.record(orphan.entry_id, is_keyed=True)
        try:
            accepted = decode_accepted(entry.record)
            events = [event for group in entry.groups for event in decode_events(group)]
            rest = await resume(accepted, events, recording)
        except OverloadedError as error:
            recording.failed(UnavailableError(error.message))
            return False
        except RequestError as error:
            recording.failed(error)
            _LOG.warning("entry %s cannot be gone on with: %s", orphan.entry_id, error.message)
            return not isinstance(error, UnavailableError)
        except Exception:
            # It must not keep others from being gone on with, nor let who follows it wait for ever.
            _LOG.exception("entry %s cannot be gone on with", orphan.entry_id)
            recording.failed(WorkerFailedError("the request cannot be gone on with"))
            return True
        _LOG.info("request %s goes on after %d tokens", accepted.answer_id, len(events))
        self._adopted.add(orphan.entry_id)
        self._spawn(self._finish_adopted(orphan.entry_id, rest))
        return True

    async def _finish_adopted(self, entry_id: str, rest: Callable[[], Awaitable[None]]) -> None:
        try:
            await rest()
        finally:
            self._adopted.discard(entry_id)

    def _can_read(self, entry_id: str, entry: Entry) -> bool:
        """Whether this version understands an entry. One that it does not is left alone."""
        try:
            decode_accepted(entry.record)
            for group in entry.groups:
                decode_events(group)
        except RecordError as error:
            _LOG.error("entry %s is left alone: %s", entry_id, error)
            self._unreadable.add(entry_id)
            return False
        return True

    def _spawn(self, work: Awaitable[None]) -> None:
        # asyncio itself keeps no reference to a running task.
        task = asyncio.ensure_future(_quietly(work))
        self._background.add(task)
        task.add_done_callback(self._background.discard)


class RecordedComputation(EngineComputation):
    """Sequences at the engine whose tokens are recorded; those of a client's own key are computed to their end."""

    def __init__(
        self,
        engine: Engine,
        request_ids: Sequence[str],
        stream: TokenStream,
        recording: Recording,
        spawn: Callable[[Awaitable[None]], None],
    ) -> None:
        super().__init__(engine, request_ids, stream)
        self._recording = recording
        self._spawn = spawn

    async def close(self, unfinished: Sequence[int], go_on: Callable[[], Awaitable[None]] | None) -> bool:
        """Go on without a client where one may come back; else cancel what is not complete."""
        if not unfinished:
            self._recording.complete()
        elif self._recording.state != "open":
            await self.stop(unfinished)
        elif self._recording.is_keyed and go_on is not None:
            self._spawn(go_on())
            return True
        else:
            self._recording.remove()
            await self.stop(unfinished)
        return False


async def _quietly(work: Awaitable[None]) -> None:
    """Wait for work whose errors are recorded where they arise."""
    try:
        await work
    except RequestError as error:
        _LOG.info("a request without a client ended: %s", error.message)
    except Exception:
        _LOG.exception("a request without a client failed")


def _away() -> UnavailableError:
    return UnavailableError("the journal cannot be reached: new requests are refused until it is back")
