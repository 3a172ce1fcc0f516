"""The seam between HTTP and what computes the tokens, and the routing of tokens to their requests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from scheduler.admission import Permit
from scheduler.errors import RequestError, request_error
from scheduler.messages import ModelInfo, Request, TokenEvent, TokenEvents


class Engine(Protocol):
    """Computes requests. An implementation delivers their tokens through `TokenStream`s."""

    @property
    def name(self) -> str:
        """Name of the ApiServer to which tokens are sent; `Request.api_server`."""

    @property
    def model(self) -> ModelInfo:
        """The model that is served."""

    def admit(self, num_requests: int, num_chars: int, num_tokens: int) -> Permit:
        """Let requests begin, before their prompts of so many characters are tokenised; the caller ends the permit.

        `num_tokens` are those of prompts that came as tokens. Raises OverloadedError if the queue is full.
        """

    async def submit(self, requests: Sequence[Request]) -> Sequence[TokenStream]:
        """Start all of the requests, or none, and return their streams in the same order.

        Raises RequestError: what the scheduler has against the first of them that it refused.
        """

    async def cancel(self, request_ids: Sequence[str]) -> None:
        """End these requests early. Ids that are not known, or ended by themselves, are ignored."""

    async def abort(self, completion_id: str) -> int:
        """End a completion, whoever asked for it; return how many sequences it had. Raises UnavailableError."""

    async def metrics(self) -> str:
        """Return the metrics of the service in Prometheus' text format. Raises UnavailableError."""

    async def check_health(self) -> None:
        """Return if requests can be served. Raises UnavailableError otherwise. Does not wait for others."""


class TokenStream:
    """The events of one request, each index once and in order, whatever the order of arrival. For one reader.

    Ends after the event with a finish reason. Raises RequestError if the request failed, after the tokens
    that came before.
    """

    def __init__(self) -> None:
        self._ready: deque[TokenEvent] = deque()
        self._early: dict[int, TokenEvent] = {}
        self._next_index = 0
        self._complete = False
        self._error: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def complete(self) -> bool:
        """Whether its last event, or its error, has come. The reader may still have to read it."""
        return self._complete

    def put(self, event: TokenEvent) -> None:
        """Take an event. Repeats, and all that comes after the end, are dropped."""
        if self._complete:
            return
        if event.error_label is not None:
            self.fail(request_error(event.error_label, event.error_message or event.error_label))
            return
        if event.index >= self._next_index:
            self._early.setdefault(event.index, event)
        while not self._complete and (following := self._early.pop(self._next_index, None)):
            self._ready.append(following)
            self._next_index += 1
            self._complete = following.finish_reason is not None
        self._wake()

    def fail(self, error: RequestError) -> None:
        """End the stream with an error, unless it is complete."""
        if not self._complete:
            self._complete = True
            self._error = error
            self._wake()

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenEvent:
        while not self._ready:
            if self._error is not None:
                raise self._error
            if self._complete:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._ready.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class TokenRouter:
    """Owns the streams of all requests that are being computed. Does no I/O."""

    def __init__(self) -> None:
        self._streams: dict[str, TokenStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, request_ids: Iterable[str]) -> list[TokenStream]:
        """Return new streams for these requests. Must be called before they are submitted."""
        streams = []
        for request_id in request_ids:
            assert request_id not in self._streams, f"request id {request_id} is used twice"
            streams.append(self._streams.setdefault(request_id, TokenStream()))
        return streams

    def deliver(self, events: TokenEvents) -> None:
        """Hand each event to its stream; those of unknown, cancelled or complete requests are dropped."""
        for event in events.events:
            stream = self._streams.get(event.request_id)
            if stream is not None:
                stream.put(event)
                if stream.complete:
                    del self._streams[event.request_id]

    def close(self, request_ids: Iterable[str]) -> list[str]:
        """Forget these requests, whose readers are gone. Returns those that were not complete."""
        return [request_id for request_id in request_ids if self._streams.pop(request_id, None) is not None]

    def fail_all(self, error: RequestError) -> list[str]:
        """End every stream with an error. Returns the ids of their requests."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)
        return list(streams)
