"""How tokens are reported. Apart from the engines, so that those run without Ray."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress

from scheduler.messages import TokenEvent, TokenEvents
from scheduler.wire import Wire


class EventSender:
    """Sends token events to ApiServer actors: one message to each per call, whatever the number of tokens."""

    def __init__(self, source: str, wire: Wire) -> None:
        self._source = source
        self._wire = wire

    def send(self, events: Iterable[tuple[str, TokenEvent]]) -> None:
        """Send each (ApiServer name, event). An ApiServer that is gone is passed over: its clients are gone too."""
        by_server: defaultdict[str, list[TokenEvent]] = defaultdict(list)
        for server, event in events:
            by_server[server].append(event)
        for server, batch in by_server.items():
            # ValueError: not found, the actor died. Its requests are cancelled by the scheduler, not here.
            with suppress(ValueError):
                self._wire.post(server, "deliver", TokenEvents(source=self._source, events=tuple(batch)))
