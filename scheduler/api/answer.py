"""The answer to one request: from the tokens of its choices to what the client reads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from scheduler.api.computation import Computation
from scheduler.api.output import ChoiceOutput, Delta, join
from scheduler.api.render import Renderer
from scheduler.api.timings import timings_of
from scheduler.errors import (
    InvalidRequestError,
    RequestCancelledError,
    RequestError,
    RequestTimeoutError,
)
from scheduler.messages import TokenEvent
from scheduler.observe.requests import RequestTimeline

KEEP_ALIVE = ": keep-alive\n\n"
"""A comment, which clients of server-sent events pass over."""


class Generation:
    """A request that the engine computes.

    Owns its computation: `close` ends it, or leaves it to itself where the client may come back.
    """

    def __init__(
        self,
        answer_id: str,
        computation: Computation,
        outputs: Sequence[ChoiceOutput],
        renderer: Renderer,
        timeline: RequestTimeline,
        *,
        num_prompt_tokens: int,
        num_choices: int,
        include_usage: bool,
        continuous_usage: bool,
        timeout_s: float | None,
        keep_alive_s: float,
        headers: Mapping[str, str],
        grammar_param: str | None,
        tells_timings: bool,
    ) -> None:
        self.answer_id = answer_id
        """What the client knows it by."""
        self.headers = headers
        """What the head of the answer says besides."""
        self._computation = computation
        self._stream = stream = computation.stream
        self._outputs = outputs
        self._num_open = sum(output.finish_reason is None for output in outputs)
        self._stopped: list[int] = []
        self._renderer = renderer
        self.timeline = timeline
        """When what happened to it."""
        self._num_prompt_tokens = num_prompt_tokens
        self._num_choices = num_choices
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._keep_alive_s = keep_alive_s
        self._grammar_param = grammar_param
        self._text_s = [0.0] * len(outputs) if tells_timings else None
        """What it took to make text of each choice's tokens, if that is to be told."""
        self._timer: asyncio.TimerHandle | None = None
        if timeout_s is not None:
            error = RequestTimeoutError(f"the request took longer than {timeout_s:g} s")
            self._timer = asyncio.get_running_loop().call_later(timeout_s, stream.fail, error)

    async def answer(self) -> str:
        """Wait for all choices and return the JSON of the answer. Raises RequestError if one of them fails."""
        parts: list[list[Delta]] = [[] for _ in self._outputs]
        while self._num_open:
            for position, delta in self._push_all(await self._read()):
                parts[position].append(delta)
            await self._cancel_stopped()
        return self._renderer.answer([join(deltas) for deltas in parts], self._usage())

    async def frames(self) -> AsyncGenerator[str]:
        """Yield the events of a stream as they come, those that come together as one text. Raises RequestError.

        A comment keeps the connection in use where nothing else comes for long.
        """
        while self._num_open:
            chunks: list[str] = []
            events = await self._read(self._keep_alive_s)
            for _, delta in self._push_all(events):
                chunks += self._renderer.chunks(delta, self._usage() if self._continuous_usage else None)
            await self._cancel_stopped()
            if chunks:
                yield "".join([f"data: {chunk}\n\n" for chunk in chunks])
            elif not events:
                yield KEEP_ALIVE
        if self._include_usage:
            yield f"data: {self._renderer.last_chunk(self._usage())}\n\n"

    async def finish(self) -> None:
        """Wait for all choices, for nobody. Raises RequestError if one of them fails."""
        try:
            while self._num_open:
                for _ in self._push_all(await self._read()):
                    pass
                await self._cancel_stopped()
        finally:
            await self._end(go_on=None)

    async def close(self) -> None:
        """End what has not ended, unless the client may come back for it."""
        await self._end(go_on=self.finish)

    async def _end(self, go_on: Callable[[], Awaitable[None]] | None) -> None:
        unfinished = [i for i, output in enumerate(self._outputs) if output.finish_reason is None]
        goes_on = await self._computation.close(unfinished, go_on)
        if goes_on:
            return
        self.timeline.all_ended(RequestCancelledError.label, time.monotonic())
        if self._timer is not None:
            self._timer.cancel()

    async def _read(self, timeout_s: float | None = None) -> list[tuple[int, TokenEvent]]:
        """Return the next events, none if none came in time. Raises RequestError."""
        try:
            return await self._stream.read(timeout_s)
        except InvalidRequestError as error:
            # All else was checked before: a grammar that takes too much work shows only as it is followed.
            error.param = error.param or self._grammar_param
            self.timeline.all_ended(error.label, time.monotonic())
            raise
        except RequestError as error:
            self.timeline.all_ended(error.label, time.monotonic())
            raise

    def _push_all(self, events: Sequence[tuple[int, TokenEvent]]) -> Iterator[tuple[int, Delta]]:
        """Yield what events that came together add, one after the other, each with the position of its choice."""
        now = time.monotonic()
        for position, event in events:
            self.timeline.event(position, event, now)
            delta = self._push(position, event)
            if delta is None:
                continue
            if delta.finish_reason is not None:
                self.timeline.ended(position, delta.finish_reason, now)
            yield position, delta
        self.timeline.text_s += time.monotonic() - now

    def _push(self, position: int, event: TokenEvent) -> Delta | None:
        """Return what an event adds; None if it came after the stop string of its choice."""
        output = self._outputs[position]
        if output.finish_reason is not None:
            return None
        delta = output.push(event) if self._text_s is None else self._timed_push(position, event)
        if delta.finish_reason is not None:
            self._num_open -= 1
            if event.finish_reason is None:
                self._stopped.append(position)
        return delta

    def _timed_push(self, position: int, event: TokenEvent) -> Delta:
        """Return what an event adds; the last one with the times of its choice."""
        assert self._text_s is not None
        started = time.perf_counter()
        delta = self._outputs[position].push(event)
        self._text_s[position] += time.perf_counter() - started
        if delta.finish_reason is None:
            return delta
        timings = timings_of(self.timeline, position, self._text_s[position])
        return replace(delta, timings=timings)

    async def _cancel_stopped(self) -> None:
        """End the sequences whose text ended with a stop string."""
        if self._stopped:
            stopped, self._stopped = self._stopped, []
            await self._computation.stop(stopped)

    def _usage(self) -> dict[str, Any]:
        num_output_tokens = sum(output.num_tokens for output in self._outputs)
        # Of each prompt's first choice: the others may find cached what that one has just computed.
        num_cached_tokens = sum(output.num_cached_tokens for output in self._outputs[:: self._num_choices])
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": self._num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
        }
