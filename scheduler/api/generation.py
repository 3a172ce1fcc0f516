"""One generation, of a completion or a chat: how it begins, and goes on where somebody else began it."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace

from scheduler.api.answer import Generation
from scheduler.api.body import parse_as
from scheduler.api.chat_protocol import ChatRequest
from scheduler.api.completion_protocol import CompletionRequest
from scheduler.api.computation import Computation, EngineComputation
from scheduler.api.engine import Engine, TokenStream
from scheduler.api.fields import shorten
from scheduler.api.idempotency import KEY_HEADER, REPLAYED_HEADER, Ticket
from scheduler.api.journaling import Journaling
from scheduler.api.logprobs import TokenNames
from scheduler.api.output import ChoiceOutput, OutputRules, Prompt
from scheduler.api.prompts import GenerationRequest, PromptEncoder
from scheduler.api.recorder import Recording
from scheduler.api.records import AcceptedRequest
from scheduler.api.render import ChatRenderer, CompletionRenderer, Renderer
from scheduler.api.sequences import make_requests
from scheduler.api.structured import GrammarChecker
from scheduler.api.tokenizer import Tokenizer
from scheduler.errors import InvalidRequestError, ModelNotFoundError
from scheduler.messages import Request, TokenEvent
from scheduler.observe.registry import Registry
from scheduler.observe.requests import RequestTimeline

BODIES: Mapping[str, type[CompletionRequest] | type[ChatRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
}
"""What the body of each path is."""


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
        journaling: Journaling | None = None,
        timeout_s: float | None = None,
        keep_alive_s: float = 15.0,
        prefix_cache: bool = True,
        registry: Registry,
    ) -> None:
        """`timeout_s`: longest that a request may take. `keep_alive_s`: longest that a stream is silent.

        `prefix_cache`: whether requests may use cached KV. `registry` is where it is counted what clients see.
        """
        self._prefix_cache = prefix_cache
        self._engine = engine
        self._registry = registry
        self._encoder = encoder
        self._tokenizer = tokenizer
        self._model_names = tuple(model_names)
        self._journaling = journaling
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

    async def start(
        self, body: GenerationRequest, key_digest: str = "", ticket: Ticket | None = None
    ) -> Generation:
        """Submit all sequences of a request. The caller must close what is returned.

        `key_digest` stands for the API key that the client sent; key and user together share what one is due.
        With a `ticket` the request is written into the journal first; if it is there, the answer comes from there.
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
        if ticket is not None and ticket.is_keyed and self._journaling is not None:
            found = await self._journaling.find(ticket)
            if found is not None:
                return self._generation(body, *found, headers=_headers(ticket, is_replayed=True))
        size, n = self._encoder.size(body), body.n
        # Tokenising is wasted on a request that would only be turned away.
        with self._engine.admit(n * size.num_prompts, n * size.num_chars, n * size.num_tokens) as permit:
            prompts = await self._encoder.encode(body)
            permit.settle(n * sum(len(prompt.token_ids) for prompt in prompts))
            answer_id = body.request_id or _new_id(body)
            requests = self._requests(body, prompts, answer_id, key_digest)
            accepted = AcceptedRequest(
                path="" if ticket is None else ticket.path,
                body="" if ticket is None else ticket.body,
                key_digest=key_digest,
                is_keyed=ticket is not None and ticket.is_keyed,
                answer_id=answer_id,
                created=int(time.time()),
                prompts=tuple(prompts),
                samplings=tuple(request.sampling for request in requests),
            )
            timeline.submitted_at = time.monotonic()
            return await self._submit(body, accepted, requests, ticket, timeline)

    async def resume(
        self,
        accepted: AcceptedRequest,
        events: Sequence[tuple[int, TokenEvent]],
        recording: Recording,
    ) -> Callable[[], Awaitable[None]]:
        """Submit what is not complete of a request that somebody else began; return what waits for the rest.

        `events`: what came of it, each with the number of its choice. Raises RequestError if the engine does not
        accept it.
        """
        assert self._journaling is not None
        body = parse_as(json.loads(accepted.body), BODIES[accepted.path])
        made = self._requests(body, accepted.prompts, accepted.answer_id, accepted.key_digest)
        outputs = self._outputs(body, accepted)
        tokens: list[list[int]] = [[] for _ in made]
        for choice, event in events:
            # A group may be there twice, after a write that nobody confirmed.
            if event.index == len(tokens[choice]) and outputs[choice].finish_reason is None:
                outputs[choice].push(event)
                tokens[choice] += [] if event.token_id is None else [event.token_id]
        requests = [
            replace(request, sampling=sampling, output_token_ids=tuple(token_ids))
            for request, sampling, token_ids in zip(made, accepted.samplings, tokens, strict=True)
        ]
        left = [choice for choice, output in enumerate(outputs) if output.finish_reason is None]
        stream = await self._engine.submit([requests[choice] for choice in left]) if left else TokenStream(())
        request_ids = [request.request_id for request in requests]
        computation = self._journaling.compute(self._engine, request_ids, stream, recording, left)
        return self._generation(body, accepted, computation, outputs=outputs).finish

    def _requests(
        self, body: GenerationRequest, prompts: Sequence[Prompt], answer_id: str, key_digest: str
    ) -> list[Request]:
        engine = self._engine
        return make_requests(
            body,
            prompts,
            engine.model,
            engine.name,
            answer_id,
            key_digest,
            prefix_cache=self._prefix_cache,
        )

    async def _submit(
        self,
        body: GenerationRequest,
        accepted: AcceptedRequest,
        requests: Sequence[Request],
        ticket: Ticket | None,
        timeline: RequestTimeline,
    ) -> Generation:
        """Write a request down, if there is a ticket, and submit its sequences."""
        request_ids = [request.request_id for request in requests]
        if ticket is None or self._journaling is None:
            stream = await self._engine.submit(requests)
            computation: Computation = EngineComputation(self._engine, request_ids, stream)
            return self._generation(body, accepted, computation, timeline=timeline)
        if ticket.is_keyed:
            noted = await self._journaling.accept(ticket, accepted)
            if isinstance(noted, tuple):
                return self._generation(body, *noted, headers=_headers(ticket, is_replayed=True))
            try:
                stream = await self._engine.submit(requests)
            except BaseException:
                if noted is not None:
                    await self._journaling.refuse(noted)
                raise
        else:
            noted, stream = await self._submit_and_accept(self._journaling, ticket, accepted, requests)
        if noted is None:
            computation = EngineComputation(self._engine, request_ids, stream)
            return self._generation(body, accepted, computation, timeline=timeline)
        computation = self._journaling.compute(self._engine, request_ids, stream, noted, range(len(requests)))
        headers = _headers(ticket, is_replayed=False)
        return self._generation(body, accepted, computation, timeline=timeline, headers=headers)

    async def _submit_and_accept(
        self, journaling: Journaling, ticket: Ticket, accepted: AcceptedRequest, requests: Sequence[Request]
    ) -> tuple[Recording | None, TokenStream]:
        """Submit a request whose key is ours, so that nobody else has it, while it is being written down."""
        journaling.check_ready()
        accepting = asyncio.ensure_future(journaling.accept(ticket, accepted))
        try:
            stream = await self._engine.submit(requests)
        except BaseException:
            await journaling.withdraw(accepting)
            raise
        try:
            noted = await accepting
        except BaseException:
            await self._engine.cancel([request.request_id for request in requests])
            raise
        assert not isinstance(noted, tuple), "a key that was made here came before"
        return noted, stream

    def _generation(
        self,
        body: GenerationRequest,
        accepted: AcceptedRequest,
        computation: Computation,
        *,
        timeline: RequestTimeline | None = None,
        outputs: Sequence[ChoiceOutput] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Generation:
        """`timeline`: None for what was counted before, when it was computed or began to be."""
        if timeline is None:
            timeline = RequestTimeline(Registry(), time.monotonic())
        head = {"id": accepted.answer_id, "created": accepted.created, "model": body.model}
        names = TokenNames(self._tokenizer, as_ids=body.return_tokens_as_token_ids)
        of_choices = [prompt for prompt in accepted.prompts for _ in range(body.n)]
        renderer: Renderer = (
            ChatRenderer(body, head, of_choices, names)
            if isinstance(body, ChatRequest)
            else CompletionRenderer(body, head, of_choices, names)
        )
        timeline.submitted([len(prompt.token_ids) for prompt in of_choices], timeline.submitted_at)
        return Generation(
            accepted.answer_id,
            computation,
            self._outputs(body, accepted) if outputs is None else outputs,
            renderer,
            timeline,
            num_prompt_tokens=sum(len(prompt.token_ids) for prompt in accepted.prompts),
            num_choices=body.n,
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
            timeout_s=self._timeout_s,
            keep_alive_s=self._keep_alive_s,
            headers=headers or {},
            grammar_param=None if body.grammar is None else body.grammar_param,
            tells_timings=body.return_timings,
        )

    def _outputs(self, body: GenerationRequest, accepted: AcceptedRequest) -> list[ChoiceOutput]:
        rules = OutputRules(
            stops=body.stop,
            stop_token_ids=body.stop_token_ids,
            include_stop=body.include_stop_str_in_output,
            min_tokens=body.min_tokens,
            prompt_only=body.asked_max_tokens == 0,
            logprobs=body.num_top_logprobs is not None,
        )
        of_choices = [prompt for prompt in accepted.prompts for _ in range(body.n)]
        return [
            ChoiceOutput(i, self._encoder.detokenizer(body), rules, prompt)
            for i, prompt in enumerate(of_choices)
        ]


def _new_id(body: GenerationRequest) -> str:
    return f"{'chatcmpl' if isinstance(body, ChatRequest) else 'cmpl'}-{uuid.uuid4().hex}"


def _headers(ticket: Ticket, *, is_replayed: bool) -> dict[str, str]:
    """Return what the answer says of the journal: how to ask again, and whether this is such an answer."""
    headers = {KEY_HEADER: ticket.key}
    return headers | {REPLAYED_HEADER: "true"} if is_replayed else headers
