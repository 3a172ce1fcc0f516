"""One completion: from the body of its HTTP request to sequences, and from their tokens to text."""

from __future__ import annotations

import hashlib
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from scheduler.api.engine import Engine, TokenStream
from scheduler.api.merge import merge
from scheduler.api.protocol import (
    DEFAULT_MAX_TOKENS,
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
    Usage,
)
from scheduler.api.stop import StopMatcher
from scheduler.api.tokenizer import Detokenizer, NoDetokenizer, Tokenizer
from scheduler.errors import InvalidRequestError, ModelNotFoundError
from scheduler.messages import FinishReason, ModelInfo, Request, SamplingParams, TokenEvent


class CompletionStarter:
    """Checks and submits completions.

    Knows the model, its tokenizer and the engine; keeps nothing of a request.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None, model_names: Collection[str]) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._model_names = tuple(model_names)

    async def start(self, body: CompletionRequest, key_digest: str = "") -> RunningCompletion:
        """Submit all sequences of a completion. The caller must close what is returned.

        `key_digest` stands for the API key that the client sent; key and user together share what one is due.
        Raises RequestError: a field is wrong, the model is unknown, or the engine does not accept it.
        """
        if body.model not in self._model_names:
            served = ", ".join(self._model_names)
            raise ModelNotFoundError(
                f"model {body.model!r} is not served here; served: {served}", param="model"
            )
        completion_id = body.request_id or f"cmpl-{uuid.uuid4().hex}"
        num_chars = sum(len(prompt) for prompt in body.prompt if isinstance(prompt, str))
        num_tokens = sum(len(prompt) for prompt in body.prompt if not isinstance(prompt, str))
        # Tokenising is wasted on a request that would only be turned away.
        with self._engine.admit(body.n * len(body.prompt), body.n * num_chars, body.n * num_tokens) as permit:
            prompts = await self._encode(body)
            permit.settle(body.n * sum(map(len, prompts)))
            requests = make_requests(
                body, prompts, self._engine.model, self._engine.name, completion_id, key_digest
            )
            streams = await self._engine.submit(requests)
        choices = [
            _Choice(request=request, stream=stream, output=self._output(body))
            for request, stream in zip(requests, streams, strict=True)
        ]
        num_prompt_tokens = sum(map(len, prompts))
        return RunningCompletion(self._engine, body, completion_id, choices, num_prompt_tokens)

    async def _encode(self, body: CompletionRequest) -> list[tuple[int, ...]]:
        """Return the token ids of each prompt."""
        texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
        if texts and self._tokenizer is None:
            raise InvalidRequestError(
                "prompt must be token ids: the served model has no tokenizer", param="prompt"
            )
        encoded = iter(await self._tokenizer.encode(texts) if self._tokenizer else ())
        return [next(encoded) if isinstance(prompt, str) else prompt for prompt in body.prompt]

    def _output(self, body: CompletionRequest) -> ChoiceOutput:
        detokenizer = self._tokenizer.detokenizer() if self._tokenizer else NoDetokenizer()
        return ChoiceOutput(detokenizer, stops=body.stop, min_tokens=body.min_tokens)


def make_requests(
    body: CompletionRequest,
    prompts: Sequence[tuple[int, ...]],
    model: ModelInfo,
    api_server: str,
    completion_id: str,
    key_digest: str = "",
) -> list[Request]:
    """Return one request for each choice of each prompt: all choices of the first prompt, then of the
    second...

    Raises InvalidRequestError if a token id or a length is not one that the model can take.
    """
    requests: list[Request] = []
    nonce = secrets.token_hex(4)  # A client may use its own id twice.
    for i, prompt in enumerate(prompts):
        where = f"prompt {i}" if len(prompts) > 1 else "prompt"
        _check_prompt(prompt, model, where)
        max_tokens = _max_tokens(body, len(prompt), model, where)
        for choice in range(body.n):
            sampling = SamplingParams(
                max_tokens=max_tokens,
                min_tokens=body.min_tokens,
                temperature=body.temperature,
                top_p=body.top_p,
                top_k=min(max(body.top_k, 0), model.vocab_size),
                seed=choice_seed(body.seed, choice),
                stop_token_ids=() if body.ignore_eos else model.eos_token_ids,
            )
            requests.append(
                Request(
                    request_id=f"{completion_id}-{nonce}-{len(requests)}",
                    api_server=api_server,
                    prompt_token_ids=prompt,
                    sampling=sampling,
                    priority=body.priority,
                    ttft_slo_s=None if body.ttft_slo_ms is None else body.ttft_slo_ms / 1000,
                    tenant=f"{key_digest}/{body.user}",
                    completion_id=completion_id,
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
        return secrets.randbits(63)
    if choice:
        digest = hashlib.sha256(f"{seed}:{choice}".encode()).digest()
        seed = int.from_bytes(digest[:8], "big")
    return seed % 2**63


def _check_prompt(prompt: tuple[int, ...], model: ModelInfo, where: str) -> None:
    if not prompt:
        raise InvalidRequestError(f"{where} has no token in it", param="prompt")
    if len(prompt) >= model.max_model_len:
        raise InvalidRequestError(
            f"{where} has {len(prompt)} tokens, which is longer than the model's context length allows: "
            f"prompt and completion together must have <= {model.max_model_len} tokens",
            param="prompt",
        )
    for token_id in (min(prompt), max(prompt)):
        if not 0 <= token_id < model.vocab_size:
            raise InvalidRequestError(
                f"{where} holds token id {token_id} at position {prompt.index(token_id)}, out of vocabulary: "
                f"token ids must be >= 0 and < {model.vocab_size}",
                param="prompt",
            )


def _max_tokens(body: CompletionRequest, num_prompt_tokens: int, model: ModelInfo, where: str) -> int:
    """Return how many tokens to produce at most."""
    room = model.max_model_len - num_prompt_tokens
    max_tokens = min(DEFAULT_MAX_TOKENS, room) if body.max_tokens is None else body.max_tokens
    if max_tokens > room:
        raise InvalidRequestError(
            f"max_tokens must be <= {room}, got {max_tokens}: {where} has {num_prompt_tokens} tokens, and "
            f"with the completion it must have <= {model.max_model_len}, the model's context length",
            param="max_tokens",
        )
    if body.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens must be <= max_tokens, which is {max_tokens}, got {body.min_tokens}",
            param="min_tokens",
        )
    return max_tokens


class ChoiceOutput:
    """Makes the text of one sequence out of its tokens, and knows when it ends. Does no I/O."""

    def __init__(self, detokenizer: Detokenizer, *, stops: Sequence[str], min_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self.num_tokens = 0
        """Tokens received: those of a stop string and the end token count."""
        self.finish_reason: FinishReason | None = None

    def push(self, event: TokenEvent) -> str:
        """Take the next event and return the text that may go out now; the last one sets `finish_reason`."""
        text = ""
        if event.token_id is not None:
            self.num_tokens += 1
            # A token that ended the sequence is not part of its text.
            if event.finish_reason != "stop":
                text = self._detokenizer.push(event.token_id)
        if event.finish_reason is not None:
            text += self._detokenizer.flush()
        text = self._matcher.feed(text, armed=self.num_tokens >= self._min_tokens)
        if self._matcher.matched is not None:
            self.finish_reason = "stop"
        elif event.finish_reason is not None:
            text += self._matcher.flush()
            self.finish_reason = event.finish_reason
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    request: Request
    stream: TokenStream
    output: ChoiceOutput

    @property
    def request_id(self) -> str:
        return self.request.request_id


class RunningCompletion:
    """A completion that the engine computes.

    Owns its sequences: `close` cancels those that have not ended.
    """

    def __init__(
        self,
        engine: Engine,
        body: CompletionRequest,
        completion_id: str,
        choices: Sequence[_Choice],
        num_prompt_tokens: int,
    ) -> None:
        self._engine = engine
        self._body = body
        self._id = completion_id
        self._created = int(time.time())
        self._choices = choices
        self._num_prompt_tokens = num_prompt_tokens

    async def result(self) -> CompletionResponse:
        """Wait for all choices and return them. Raises RequestError if one of them fails."""
        parts: list[list[CompletionChoice]] = [[] for _ in self._choices]
        async with aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                parts[delta.index].append(delta)
        return self._response([_join(deltas) for deltas in parts], self._usage())

    async def chunks(self) -> AsyncGenerator[str]:
        """Yield the JSON of each chunk of a stream, one for each token. Raises RequestError."""
        # `usage` is null in all chunks but the last, or absent from all.
        exclude = None if self._body.include_usage else {"usage"}
        async with aclosing(self._deltas()) as deltas:
            async for delta in deltas:
                # ASCII only, as some clients take U+2028 or U+0085 for the end of a line.
                yield self._response([delta]).model_dump_json(exclude=exclude, ensure_ascii=True)
        if self._body.include_usage:
            yield self._response([], self._usage()).model_dump_json(ensure_ascii=True)

    async def close(self) -> None:
        """Cancel what has not ended."""
        await self._engine.cancel(
            [choice.request_id for choice in self._choices if choice.output.finish_reason is None]
        )

    def _deltas(self) -> AsyncGenerator[CompletionChoice]:
        """Yield what each token adds to its choice, as the tokens come."""
        return merge([self._choice_deltas(i) for i in range(len(self._choices))])

    async def _choice_deltas(self, index: int) -> AsyncGenerator[CompletionChoice]:
        choice = self._choices[index]
        async for event in choice.stream:
            text = choice.output.push(event)
            finish_reason = choice.output.finish_reason
            if finish_reason is not None and event.finish_reason is None:
                await self._engine.cancel([choice.request_id])  # a stop string ended it
            delta = CompletionChoice(index=index, text=text, finish_reason=finish_reason)
            if self._body.return_token_ids:
                delta.token_ids = [] if event.token_id is None else [event.token_id]
                if event.index == 0:
                    delta.prompt_token_ids = list(choice.request.prompt_token_ids)
            yield delta
            if finish_reason is not None:
                return

    def _usage(self) -> Usage:
        num_output_tokens = sum(choice.output.num_tokens for choice in self._choices)
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=num_output_tokens,
            total_tokens=self._num_prompt_tokens + num_output_tokens,
        )

    def _response(self, choices: list[CompletionChoice], usage: Usage | None = None) -> CompletionResponse:
        return CompletionResponse(
            id=self._id, created=self._created, model=self._body.model, choices=choices, usage=usage
        )


def _join(deltas: Sequence[CompletionChoice]) -> CompletionChoice:
    """Return the whole choice of which `deltas` are the parts in a stream."""
    first, last = deltas[0], deltas[-1]
    whole = last.model_copy(update={"text": "".join(delta.text for delta in deltas)})
    if first.token_ids is not None:
        whole.token_ids = [token_id for delta in deltas for token_id in delta.token_ids or ()]
        whole.prompt_token_ids = first.prompt_token_ids
    return whole
