"""What prefill and decode both decide about a sequence: when it ends, and how a token is reported."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import ray

from scheduler.messages import RAY_NAMESPACE, FinishReason, Request, TokenEvent, TokenEvents


def finish_reason(request: Request, output_index: int, token_id: int) -> FinishReason | None:
    """Return why the sequence ends with `token_id` as its output number `output_index`, or None if it goes on."""
    sampling = request.sampling
    if token_id in sampling.stop_token_ids and output_index >= sampling.min_tokens:
        return "stop"
    return "length" if output_index + 1 >= sampling.max_tokens else None


class EventSender:
    """Sends token events to ApiServer actors: one message to each per call, whatever the number of tokens."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._handles: dict[str, Any] = {}

    def send(self, events: Iterable[tuple[str, TokenEvent]]) -> None:
        """Send each (ApiServer name, event). An ApiServer that is gone is passed over: its clients are gone too."""
        by_server: defaultdict[str, list[TokenEvent]] = defaultdict(list)
        for server, event in events:
            by_server[server].append(event)
        for server, batch in by_server.items():
            try:
                if server not in self._handles:
                    self._handles[server] = ray.get_actor(server, namespace=RAY_NAMESPACE)
                self._handles[server].deliver.remote(TokenEvents(source=self._source, events=tuple(batch)))
            except ValueError:
                # Not found: the actor died. Its requests are cancelled by the scheduler, not here.
                self._handles.pop(server, None)
