"""The seam between HTTP and what computes the tokens, and the routing of tokens to their requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

from scheduler.admission import Permit
from scheduler.errors import RequestError, request_error
from scheduler.messages import ModelInfo, Request, ServiceLoad, ServiceStatus, TokenEvent, TokenEvents


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

    async def submit(self, requests: Sequence[Request]) -> TokenStream:
        """Start all of the requests, or none, and return the stream of their tokens.

        Raises RequestError: what the scheduler has against the first of them that it refused.
        """

    async def cancel(self, request_ids: Sequence[str]) -> None:
        """End these requests early. Ids that are not known, or ended by themselves, are ignored."""

    async def abort(self, completion_id: str, key_digest: str) -> int:
        """End a completion that was asked for with this API key; return how many sequences it had.

        Raises PermissionDeniedError if it belongs to another key, and UnavailableError.
        """

    async def reset_prefix_cache(self) -> int:
        """Forget all cached blocks of tokens; return how many they were. Raises UnavailableError."""

    async def metrics(self) -> str:
        """Return the metrics of the service in Prometheus' text format. Raises UnavailableError."""

    async def status(self) -> ServiceStatus:
        """Return what the service does, in one look. Raises UnavailableError."""

    async def load(self) -> ServiceLoad:
        """Return how much the service has to do. Raises UnavailableError."""

    async def check_health(self) -> None:
        """Return if requests can be served. Raises UnavailableError otherwise. Does not wait for others."""

    async def check_ready(self) -> None:
        """Return if what is accepted makes progress. Raises UnavailableError otherwise, with the reason."""


class Tap(Protocol):
    """Told of everything that goes through a stream, as it comes and whether it is read or not."""

    def took(self, position: int, event: TokenEvent) -> None:
        """An event came, the next one of its request."""

    def failed(self, error: RequestError) -> None:
        """The stream ends with an error."""


class _Sequence:
    """What came of one request: puts its events in order."""

    __slots__ = ("early", "next_index", "position", "token_ids")

    def __init__(self, position: int, next_index: int) -> None:
        self.position = position
        self.next_index = next_index
        self.token_ids: list[int] = []
        self.early: dict[int, TokenEvent] = {}


class TokenStream:
    """The events of some requests, each request's in order and each of them once, however they arrive.

    For one reader. A request ends with the event that has a finish reason. If one fails, all do: the reader gets
    what came before, then the error.
    """

    def __init__(self, request_ids: Sequence[str], first_indexes: Sequence[int] | None = None) -> None:
        """`first_indexes`: of each request's first event, where it is not 0."""
        starts = first_indexes or [0] * len(request_ids)
        self._open = {
            request_id: _Sequence(i, start)
            for i, (request_id, start) in enumerate(zip(request_ids, starts, strict=True))
        }
        self._ready: list[tuple[int, TokenEvent]] = []
        self._tap: Tap | None = None
        self._error: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def attach(self, tap: Tap, positions: Sequence[int]) -> None:
        """Give the requests these positions, and tell the tap of everything, also of what is there already.

        To be called before the stream is read.
        """
        for sequence in self._open.values():
            sequence.position = positions[sequence.position]
        self._ready = [(positions[position], event) for position, event in self._ready]
        self._tap = tap
        for position, event in self._ready:
            tap.took(position, event)
        if self._error is not None:
            tap.failed(self._error)

    def put(self, event: TokenEvent) -> bool:
        """Take an event, and return whether its request is complete. Repeats are dropped."""
        sequence = self._open.get(event.request_id)
        if sequence is None:
            return True
        if event.error_label is not None:
            self.fail(request_error(event.error_label, event.error_message or event.error_label))
            return True
        if event.index >= sequence.next_index:
            sequence.early.setdefault(event.index, event)
        complete = False
        while not complete and (following := sequence.early.pop(sequence.next_index, None)):
            self._ready.append((sequence.position, following))
            if self._tap is not None:
                self._tap.took(sequence.position, following)
            sequence.next_index += 1
            if following.token_id is not None:
                sequence.token_ids.append(following.token_id)
            complete = following.finish_reason is not None
        if complete:
            del self._open[event.request_id]
        self._wake()
        return complete

    def token_ids(self, request_id: str) -> tuple[int, ...]:
        """Return the tokens of a request that is not complete, from its first index on and up to the first gap."""
        return tuple(self._open[request_id].token_ids)

    def fail(self, error: RequestError) -> None:
        """End the stream with an error, unless all of its requests are complete."""
        if self._open and self._error is None:
            self._error = error
            if self._tap is not None:
                self._tap.failed(error)
            self._wake()

    async def read(self, timeout_s: float | None = None) -> list[tuple[int, TokenEvent]]:
        """Return all events that are there, each with the position of its request; wait if there is none.

        The list is empty if none came in time. Raises RequestError once all that came before it has been read.
        Must not be called once the last event of every request has been read.
        """
        if not self._ready:
            if self._error is not None:
                raise self._error
            assert self._open, "all events have been read"
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = None if timeout_s is None else loop.call_later(timeout_s, self._wake)
            try:
                await self._waiter
            finally:
                if timer is not None:
                    timer.cancel()
            if not self._ready and self._error is not None:
                raise self._error
        ready, self._ready = self._ready, []
        return ready

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def first_indexes(requests: Iterable[Request]) -> list[int]:
    """Return the index of each request's next token."""
    return [len(request.output_token_ids) for request in requests]


class TokenRouter:
    """Owns the streams of all requests that are being computed. Does no I/O."""

    def __init__(self) -> None:
        self._streams: dict[str, TokenStream] = {}
        self._emptied = asyncio.Event()

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, request_ids: Sequence[str], first_indexes: Sequence[int] | None = None) -> TokenStream:
        """Return a new stream for these requests. Must be called before they are submitted.

        `first_indexes`: of each request's first event, where it is not 0.
        """
        stream = TokenStream(request_ids, first_indexes)
        for request_id in request_ids:
            assert request_id not in self._streams, f"request id {request_id} is used twice"
            self._streams[request_id] = stream
        return stream

    def deliver(self, events: TokenEvents) -> None:
        """Hand each event to its stream; those of unknown, cancelled or complete requests are dropped."""
        for event in events.events:
            stream = self._streams.get(event.request_id)
            if stream is not None and stream.put(event):
                del self._streams[event.request_id]
        self._note_if_empty()

    def unfinished(self) -> dict[str, tuple[int, ...]]:
        """Return the tokens that came so far for each request that is not complete."""
        return {request_id: stream.token_ids(request_id) for request_id, stream in self._streams.items()}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def close(self, request_ids: Iterable[str]) -> list[str]:
        """Forget these requests, whose readers are gone. Returns those that were not complete."""
        open_ids = [i for i in request_ids if self._streams.pop(i, None) is not None]
        self._note_if_empty()
        return open_ids

    def fail_all(self, error: RequestError) -> list[str]:
        """End every stream with an error. Returns the ids of their requests."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)
        self._note_if_empty()
        return list(streams)

    async def wait_until_empty(self) -> None:
        """Return once no request is being computed."""
        while self._streams:
            self._emptied.clear()
            await self._emptied.wait()

    def _note_if_empty(self) -> None:
        if not self._streams:
            self._emptied.set()
