"""The tokens of a request that somebody computes, from the journal."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from scheduler.api.engine import TokenStream
from scheduler.api.records import RecordError, decode_error, decode_events
from scheduler.errors import RequestError, UnavailableError
from scheduler.journal.base import Journal, JournalError

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.25
"""As long as tokens wait to be written."""

_LOG = logging.getLogger(__name__)


class Follower:
    """A `Computation` that reads an entry again and again, until it is complete. Computes nothing."""

    def __init__(self, journal: Journal, entry_id: str, num_choices: int) -> None:
        self._journal = journal
        self._entry_id = entry_id
        self._names = [str(choice) for choice in range(num_choices)]
        self._stream = TokenStream(self._names)
        self._reading = asyncio.create_task(self._read())

    @property
    def stream(self) -> TokenStream:
        """The tokens, from the first one on."""
        return self._stream

    async def stop(self, choices: Sequence[int]) -> None:
        """Whoever computes them sees by itself that the texts of these choices are complete."""

    async def close(self, unfinished: Sequence[int], go_on: Callable[[], Awaitable[None]] | None) -> bool:
        """Read no more."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        return False

    async def _read(self) -> None:
        try:
            await self._read_all()
            # Choices that a stop string ended have no last event; whoever knows their text reads no further.
            self._stream.fail(UnavailableError("the journal does not have the whole result"))
        except RequestError as error:
            self._stream.fail(error)
        except (JournalError, RecordError) as error:
            self._stream.fail(UnavailableError(str(error)))
        except Exception:
            # Whoever waits would wait for ever.
            _LOG.exception("the journal's entry %s cannot be read", self._entry_id)
            self._stream.fail(UnavailableError("the journal's entry cannot be read"))

    async def _read_all(self) -> None:
        num_groups, pause_s, state = 0, _FIRST_PAUSE_S, "open"
        while state == "open":
            entry = await self._journal.read(self._entry_id, num_groups)
            if entry is None:
                raise UnavailableError("the request with this key was cancelled; send it again")
            for group in entry.groups:
                for choice, event in decode_events(group):
                    self._stream.put(replace(event, request_id=self._names[choice]))
            if entry.state == "failed":
                raise decode_error(entry.error)
            num_groups, state = num_groups + len(entry.groups), entry.state
            if state == "open":
                pause_s = _FIRST_PAUSE_S if entry.groups else min(2 * pause_s, _LONGEST_PAUSE_S)
                await asyncio.sleep(pause_s)
