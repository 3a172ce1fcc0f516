"""The HTTP application without a service behind it: an engine whose tokens the test decides."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from starlette.types import ASGIApp
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer

from scheduler.admission import Admission, Permit
from scheduler.api.app import AppSettings, create_app
from scheduler.api.auth import key_digest
from scheduler.api.chat_template import ChatTemplate
from scheduler.api.engine import TokenRouter, TokenStream, first_indexes
from scheduler.api.journaling import Journaling
from scheduler.api.tokenizer import Tokenizer
from scheduler.errors import RequestError
from scheduler.messages import (
    ActorStatus,
    FinishReason,
    ModelInfo,
    Request,
    SamplingParams,
    ServiceLoad,
    ServiceStatus,
    TokenEvent,
    TokenEvents,
    TokenLogprobs,
)

END = 256
"""The end token. Tokens 0 to 255 are the bytes."""

MODEL = ModelInfo(
    name="bytes", max_model_len=64, vocab_size=300, eos_token_ids=(END,), dtype="float32", num_parameters=1
)


def byte_tokenizer(folder: Path) -> Tokenizer:
    """Return a tokenizer with one token for each byte, and an end token."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    vocab = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    tokenizer = HfTokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder / "tokenizer.json")


def logprobs_of(token_id: int, num_top: int) -> TokenLogprobs:
    """Tokens 65, 66, ... are the likeliest: token 65 + i has the logprob -(i + 1). Others have -9.5."""
    top = tuple((65 + i, -1.0 - i) for i in range(num_top))
    logprob = 64.0 - token_id if 65 <= token_id < 70 else -9.5
    return TokenLogprobs(token_id=token_id, logprob=logprob, top=top)


class ScriptedEngine:
    """Accepts everything, unless `refusal` is set, and answers request number i with the text `texts[i]`.

    A text is sent byte by byte, and ends for the reason `length`, or with the end token if it ends in "<end>".
    With `texts` None, tokens come only from `send`. `errors` holds the label and message with which some fail.
    """

    def __init__(
        self, texts: Sequence[str] | None = None, errors: Mapping[int, tuple[str, str]] | None = None
    ) -> None:
        self.texts = texts
        self._errors = errors or {}
        self.refusal: RequestError | None = None
        self.failure: RequestError | None = None
        self.requests: list[Request] = []
        self.num_cached: Sequence[int] = ()
        """Of each request, how many tokens of its prompt were cached; those beyond the last: none."""
        self._num_cached: dict[str, int] = {}
        self._sampling: dict[str, SamplingParams] = {}
        self._prompts: dict[str, tuple[int, ...]] = {}
        self.submitted = asyncio.Event()
        self.on_submit: Callable[[], object] = lambda: None
        self.cancelled: list[str] = []
        self.router = TokenRouter()
        self.admission = Admission(max_requests=10_000, max_tokens=1_000_000)

    def restart(self, texts: Sequence[str]) -> None:
        """Forget what was asked so far, and answer with these texts."""
        self.texts, self.requests = texts, []

    @property
    def name(self) -> str:
        return "api-0"

    @property
    def model(self) -> ModelInfo:
        return MODEL

    def admit(self, num_requests: int, num_chars: int, num_tokens: int) -> Permit:
        return self.admission.admit_text(num_requests, num_chars, 0.0, num_tokens=num_tokens)

    async def abort(self, completion_id: str, key_digest: str) -> int:
        ids = [r.request_id for r in self.requests if r.completion_id == completion_id]
        for request_id in ids:
            self.fail(request_id, "cancelled", "the request was cancelled")
        return len(ids)

    async def submit(self, requests: Sequence[Request]) -> TokenStream:
        if self.refusal is not None:
            raise self.refusal
        stream = self.router.open([request.request_id for request in requests], first_indexes(requests))
        for request in requests:
            self._sampling[request.request_id] = request.sampling
            self._prompts[request.request_id] = request.prompt_token_ids
            number = len(self.requests)
            self._num_cached[request.request_id] = dict(enumerate(self.num_cached)).get(number, 0)
            if error := self._errors.get(len(self.requests)):
                self.fail(request.request_id, *error)
            elif self.texts is not None:
                text = self.texts[len(self.requests)]
                token_ids = list(text.removesuffix("<end>").encode())
                if text.endswith("<end>"):
                    self.send(request.request_id, [*token_ids, END], finish_reason="stop")
                else:
                    self.send(request.request_id, token_ids, finish_reason="length")
            self.requests.append(request)
        self.submitted.set()
        self.on_submit()
        return stream

    def send(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        start: int = 0,
        finish_reason: FinishReason | None = None,
    ) -> None:
        """Deliver tokens; the first has the index `start`, the last one the finish reason."""
        last = len(token_ids) - 1
        num_top = self._sampling[request_id].num_logprobs
        prompt_logprobs = None
        if start == 0 and num_top is not None and self._sampling[request_id].prompt_logprobs:
            rest = self._prompts[request_id][1:]
            prompt_logprobs = (None, *(logprobs_of(token_id, num_top) for token_id in rest))
        events = tuple(
            TokenEvent(
                request_id=request_id,
                index=start + i,
                token_id=token_id,
                finish_reason=finish_reason if i == last else None,
                logprobs=None if num_top is None else logprobs_of(token_id, num_top),
                prompt_logprobs=prompt_logprobs if i == 0 else None,
                num_cached_tokens=self._num_cached[request_id] if start + i == 0 else 0,
            )
            for i, token_id in enumerate(token_ids)
        )
        self.router.deliver(TokenEvents(source="decode-0", events=events))

    def fail(self, request_id: str, label: str, message: str) -> None:
        """Deliver an error."""
        event = TokenEvent(request_id=request_id, index=0, error_label=label, error_message=message)
        self.router.deliver(TokenEvents(source="decode-0", events=(event,)))

    async def cancel(self, request_ids: Sequence[str]) -> None:
        self.cancelled += self.router.close(request_ids)

    async def reset_prefix_cache(self) -> int:
        if self.failure is not None:
            raise self.failure
        return 7

    async def metrics(self) -> str:
        if self.failure is not None:
            raise self.failure
        return "purefill_queue_requests 0\n"

    async def load(self) -> ServiceLoad:
        return ServiceLoad(num_live=3, num_waiting=2, num_waiting_tokens=50)

    async def status(self) -> ServiceStatus:
        problem = None if self.failure is None else self.failure.message
        scheduler = ActorStatus(name="scheduler", pool="scheduler", state="ready", start_time=1.5)
        return ServiceStatus(problem=problem, load=await self.load(), actors=(scheduler,))

    async def check_health(self) -> None:
        if self.failure is not None:
            raise self.failure

    async def check_ready(self) -> None:
        if self.failure is not None:
            raise self.failure


CHAT = ChatTemplate(
    "{% for message in messages %}{{ message.role[0] + ':' + message.content + '|' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}",
    {},
)


def app_over(
    engine: ScriptedEngine,
    tokenizer: Tokenizer | None,
    *,
    journaling: Journaling | None = None,
    **settings: Any,
) -> ASGIApp:
    """Return the application, with the model named as in `MODEL` unless the settings say otherwise."""
    keys = tuple(map(key_digest, settings.pop("api_keys", ())))
    settings = {"model_names": (MODEL.name,), "api_keys": keys, **settings}
    return create_app(engine, tokenizer, AppSettings(**settings), chat_template=CHAT, journaling=journaling)


def send(app: ASGIApp, method: str, path: str, **options: Any) -> httpx.Response:
    """Send one request and return the whole answer."""

    async def exchange() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://purefill") as client:
            return await asyncio.wait_for(client.request(method, path, **options), timeout=60)

    return asyncio.run(exchange())


def complete(app: ASGIApp, **fields: Any) -> httpx.Response:
    """Send a completion request with these fields, and a model and prompt if they are not among them."""
    return post(app, json.dumps({"model": MODEL.name, "prompt": "Hi", **fields}))


def events(body: str) -> list[Any]:
    """The JSON of each server-sent event; checks the framing, and that the last one is [DONE]."""
    *frames, done, rest = body.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(frame.startswith("data: ") and frame.isascii() for frame in frames)
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def chat(app: ASGIApp, **fields: Any) -> httpx.Response:
    """Send a chat request with these fields, and a model and message if they are not among them."""
    body = {"model": MODEL.name, "messages": [{"role": "user", "content": "Hi"}], **fields}
    headers = {"content-type": "application/json"}
    return send(app, "POST", "/v1/chat/completions", content=json.dumps(body), headers=headers)


def post(app: ASGIApp, body: str | bytes, content_type: str = "application/json") -> httpx.Response:
    """Send the body of a completion request as it is."""
    return send(app, "POST", "/v1/completions", content=body, headers={"content-type": content_type})
