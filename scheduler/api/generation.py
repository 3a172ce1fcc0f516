"""One generation, of a completion or a chat: from its body to sequences, and from their tokens to the answer."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
import uuid
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from scheduler.api.chat_protocol import ChatRequest
from scheduler.api.engine import Engine, TokenStream
from scheduler.api.fields import MAX_BANNED_TOKENS, shorten
from scheduler.api.logprobs import TokenNames
from scheduler.api.output import ChoiceOutput, Delta, OutputRules, Prompt, join
from scheduler.api.prompts import GenerationRequest, PromptEncoder, check_vocabulary
from scheduler.api.render import ChatRenderer, CompletionRenderer, Renderer
from scheduler.api.structured import GrammarChecker
from scheduler.api.timings import timings_of
from scheduler.api.tokenizer import Tokenizer
from scheduler.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    RequestCancelledError,
    RequestError,
    RequestTimeoutError,
)
from scheduler.messages import ModelInfo, Request, SamplingParams, TokenEvent
from scheduler.observe.registry import Registry
from scheduler.observe.requests import RequestTimeline

KEEP_ALIVE = ": keep-alive\n\n"
"""A comment, which clients of server-sent events pass over."""


class GenerationStarter:
    """Checks and submits generations.

    Knows the model, its tokenizer and the engine; keeps nothing of a request.
    """

    def __init__(
        self,
        engine: Engine,
        encoder: PromptEncoder,
        tokenizer: Tokenizer | None,
        model_names: Collection[str],
        *,
        timeout_s: float | None = None,
        keep_alive_s: float = 15.0,
        registry: Registry,
    ) -> None:
        """`timeout_s`: longest that a request may take. `keep_alive_s`: longest that a stream is silent.

        `registry` is where it is counted what clients see.
        """
        self._engine = engine
        self._registry = registry
        self._encoder = encoder
        self._tokenizer = tokenizer
        self._model_names = tuple(model_names)
        self._timeout_s = timeout_s
        self._keep_alive_s = keep_alive_s
        self._grammars = GrammarChecker()

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFoundError if this model is not served. None: whichever is."""
        if name is not None and name not in self._model_names:
            served = ", ".join(self._model_names)
            raise ModelNotFoundError(
                f"model {shorten(name)} is not served here; served: {served}", param="model"
            )

    async def start(self, body: GenerationRequest, key_digest: str = "") -> Generation:
        """Submit all sequences of a request. The caller must close what is returned.

        `key_digest` stands for the API key that the client sent; key and user together share what one is due.
        Raises RequestError: a field is wrong, the model is unknown, or the engine does not accept it.
        """
        timeline = RequestTimeline(self._registry, time.monotonic())
        self.check_model(body.model)
        if body.grammar is not None:
            if self._tokenizer is None or not self._engine.model.eos_token_ids:
                raise InvalidRequestError(
                    f"{body.grammar_param} needs a model with a tokenizer and an end token",
                    param=body.grammar_param,
                )
            await self._grammars.check(body.grammar, body.grammar_param)
        is_chat = isinstance(body, ChatRequest)
        answer_id = body.request_id or f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        size, n = self._encoder.size(body), body.n
        # Tokenising is wasted on a request that would only be turned away.
        with self._engine.admit(n * size.num_prompts, n * size.num_chars, n * size.num_tokens) as permit:
            prompts = await self._encoder.encode(body)
            permit.settle(n * sum(len(prompt.token_ids) for prompt in prompts))
            requests = make_requests(
                body, prompts, self._engine.model, self._engine.name, answer_id, key_digest
            )
            submitted_at = time.monotonic()
            stream = await self._engine.submit(requests)
        timeline.submitted([len(request.prompt_token_ids) for request in requests], submitted_at)
        head = {"id": answer_id, "created": int(time.time()), "model": body.model}
        names = TokenNames(self._tokenizer, as_ids=body.return_tokens_as_token_ids)
        of_choices = [prompt for prompt in prompts for _ in range(n)]
        renderer: Renderer = (
            ChatRenderer(body, head, of_choices, names)
            if isinstance(body, ChatRequest)
            else CompletionRenderer(body, head, of_choices, names)
        )
        rules = OutputRules(
            stops=body.stop,
            stop_token_ids=body.stop_token_ids,
            include_stop=body.include_stop_str_in_output,
            min_tokens=body.min_tokens,
            prompt_only=body.asked_max_tokens == 0,
            logprobs=body.num_top_logprobs is not None,
        )
        outputs = [
            ChoiceOutput(i, self._encoder.detokenizer(body), rules, prompt)
            for i, prompt in enumerate(of_choices)
        ]
        return Generation(
            self._engine,
            answer_id,
            [request.request_id for request in requests],
            stream,
            outputs,
            renderer,
            timeline,
            num_prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
            timeout_s=self._timeout_s,
            keep_alive_s=self._keep_alive_s,
            grammar_param=None if body.grammar is None else body.grammar_param,
            tells_timings=body.return_timings,
        )


def make_requests(
    body: GenerationRequest,
    prompts: Sequence[Prompt],
    model: ModelInfo,
    api_server: str,
    answer_id: str,
    key_digest: str = "",
) -> list[Request]:
    """Return one request for each choice of each prompt: all choices of the first prompt, then of the
    second...

    Raises InvalidRequestError if a token id or a length is not one that the model can take.
    """
    requests: list[Request] = []
    check_vocabulary(body.stop_token_ids, model, "stop_token_ids", "stop_token_ids")
    check_vocabulary(tuple(i for i, _ in body.logit_bias), model, "logit_bias", "logit_bias")
    nonce = f"{random.getrandbits(32):08x}"  # A client may use its own id twice.
    for i, prompt in enumerate(prompts):
        where = f"prompt {i}" if len(prompts) > 1 else "prompt"
        max_tokens = _max_tokens(body, len(prompt.token_ids), model, where)
        for choice in range(body.n):
            requests.append(
                Request(
                    request_id=f"{answer_id}-{nonce}-{len(requests)}",
                    api_server=api_server,
                    prompt_token_ids=prompt.token_ids,
                    sampling=_sampling(body, choice, max_tokens, model),
                    priority=body.priority,
                    ttft_slo_s=None if body.ttft_slo_ms is None else body.ttft_slo_ms / 1000,
                    tenant=f"{key_digest}/{body.user}",
                    completion_id=answer_id,
                )
            )
    return requests


def choice_seed(seed: int | None, choice: int) -> int:
    """Return the seed, 0 <= seed < 2**63, of the choice with this number among those of one prompt.

    No seed: a random one. Choice 0 has the seed of the request, modulo 2**63; choice i > 0 has the first 8
    bytes of SHA-256 of "seed:i", modulo 2**63, so that the choices of neighbouring seeds have nothing in
    common. The prompts of one request do not enter: each is answered as it would be alone.
    """
    if seed is None:
        return random.getrandbits(63)
    if choice:
        digest = hashlib.sha256(f"{seed}:{choice}".encode()).digest()
        seed = int.from_bytes(digest[:8], "big")
    return seed % 2**63


def _sampling(body: GenerationRequest, choice: int, max_tokens: int, model: ModelInfo) -> SamplingParams:
    stop_token_ids = body.stop_token_ids if body.ignore_eos else (*model.eos_token_ids, *body.stop_token_ids)
    stop_token_ids = tuple(dict.fromkeys(stop_token_ids))
    if body.min_tokens and len(stop_token_ids) > MAX_BANNED_TOKENS:
        most = MAX_BANNED_TOKENS - len(set(stop_token_ids) - set(body.stop_token_ids))
        raise InvalidRequestError(
            f"stop_token_ids must hold at most {most} token ids with min_tokens > 0, "
            f"got {len(set(body.stop_token_ids))}",
            param="stop_token_ids",
        )
    wanted = [num for num in (body.num_top_logprobs, body.prompt_logprobs) if num is not None]
    echoes_logprobs = body.wants_echo and body.num_top_logprobs is not None
    return SamplingParams(
        max_tokens=max(max_tokens, 1),
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=min(max(body.top_k, 0), model.vocab_size),
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.logit_bias,
        seed=choice_seed(body.seed, choice),
        stop_token_ids=stop_token_ids,
        num_logprobs=max(wanted, default=None),
        prompt_logprobs=body.prompt_logprobs is not None or echoes_logprobs,
        grammar=body.grammar,
    )


def _max_tokens(body: GenerationRequest, num_prompt_tokens: int, model: ModelInfo, where: str) -> int:
    """Return how many tokens to produce at most."""
    room = model.max_model_len - num_prompt_tokens
    asked = body.asked_max_tokens
    max_tokens = min(body.default_max_tokens, room) if asked is None else asked
    if max_tokens > room:
        raise InvalidRequestError(
            f"{body.max_tokens_param} must be <= {room}, got {shorten(max_tokens)}: {where} has "
            f"{num_prompt_tokens} tokens, and with the completion it must have "
            f"<= {model.max_model_len}, the model's context length",
            param=body.max_tokens_param,
        )
    if body.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens must be <= max_tokens, which is {max_tokens}, got {body.min_tokens}",
            param="min_tokens",
        )
    return max_tokens


class Generation:
    """A request that the engine computes.

    Owns its sequences: `close` cancels those that have not ended.
    """

    def __init__(
        self,
        engine: Engine,
        answer_id: str,
        request_ids: Sequence[str],
        stream: TokenStream,
        outputs: Sequence[ChoiceOutput],
        renderer: Renderer,
        timeline: RequestTimeline,
        *,
        num_prompt_tokens: int,
        include_usage: bool,
        continuous_usage: bool,
        timeout_s: float | None,
        keep_alive_s: float,
        grammar_param: str | None,
        tells_timings: bool,
    ) -> None:
        self._engine = engine
        self.answer_id = answer_id
        """What the client knows it by."""
        self._request_ids = request_ids
        self._stream = stream
        self._outputs = outputs
        self._num_open = len(outputs)
        self._stopped: list[str] = []
        self._renderer = renderer
        self.timeline = timeline
        """When what happened to it."""
        self._num_prompt_tokens = num_prompt_tokens
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

    async def close(self) -> None:
        """Cancel what has not ended."""
        self.timeline.all_ended(RequestCancelledError.label, time.monotonic())
        if self._timer is not None:
            self._timer.cancel()
        if self._num_open:
            await self._engine.cancel(
                [
                    request_id
                    for request_id, output in zip(self._request_ids, self._outputs, strict=True)
                    if output.finish_reason is None
                ]
            )

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
                self._stopped.append(self._request_ids[position])
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
            await self._engine.cancel(stopped)

    def _usage(self) -> dict[str, Any]:
        num_output_tokens = sum(output.num_tokens for output in self._outputs)
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": self._num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
