"""The FastAPI application: routes and error answers over an engine."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from scheduler.api.auth import ApiKeys, KeyGuard
from scheduler.api.body import BodyReader, parse_as
from scheduler.api.chat_protocol import ChatChunk, ChatRequest, ChatResponse
from scheduler.api.chat_template import ChatTemplate
from scheduler.api.completion_protocol import CompletionRequest, CompletionResponse
from scheduler.api.direct import route_directly
from scheduler.api.engine import Engine
from scheduler.api.errors import INTERNAL_ERROR, error_response
from scheduler.api.fields import shorten
from scheduler.api.generation import BODIES, GenerationStarter
from scheduler.api.idempotency import KEY_HEADER, REPLAYED_HEADER, Ticket, make_ticket
from scheduler.api.journaling import Journaling
from scheduler.api.open_requests import OpenRequests
from scheduler.api.openapi import KEYED, OPEN_PATHS, body_of, docs_page, openapi_schema, stream_of
from scheduler.api.prompts import GenerationRequest, PromptEncoder, check_vocabulary
from scheduler.api.request_log import RequestLog, log_prompt
from scheduler.api.service_protocol import (
    ActorState,
    DeletedRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    ErrorInfo,
    ErrorResponse,
    LoadResponse,
    ModelCard,
    ModelList,
    ReadyResponse,
    ResetPrefixCacheResponse,
    StatusResponse,
    TokenizeChatRequest,
    TokenizeResponse,
    TokenizeTextRequest,
    VersionResponse,
)
from scheduler.api.sse import EventStream, until_disconnect
from scheduler.api.tokenizer import Tokenizer
from scheduler.api.ui import UI_PATHS, add_ui_routes
from scheduler.errors import InvalidRequestError, ModelNotFoundError, RequestError, RequestNotFoundError
from scheduler.observe.exposition import MEDIA_TYPE
from scheduler.observe.registry import Registry
from scheduler.observe.traces import SpanRecorder

ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorResponse}, "5XX": {"model": ErrorResponse}}
_OPEN_BODY_BYTES = 256 * 2**20
_OPEN_BODIES = 4
"""Room for this many bodies of the largest size, or for so many bytes, if that is more."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppSettings:
    """How the application treats its clients."""

    model_names: tuple[str, ...]
    """Names by which the model is called."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Digests of keys, as `key_digest` makes them: whoever wants anything computed sends one. None: everybody may."""
    max_body_bytes: int = 16 * 2**20
    client_timeout_s: float = 60.0
    """Longest that a client may take to send a body."""
    max_concurrent_requests: int = 2048
    """Requests with a body that are served at once."""
    request_timeout_s: float | None = None
    """Longest that a completion may take; None: any time."""
    cors_origins: tuple[str, ...] = ()
    """Web pages of these origins may call; ``*``: of all."""
    keep_alive_s: float = 15.0
    """Longest that a stream says nothing."""
    log_prompts: bool = False
    """Whether prompts are written to the log."""
    prefix_cache: bool = True
    """Whether requests may use cached KV."""
    serves_metrics: bool = True
    """Whether ``/metrics`` is here, and not at a port of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What the routes work with."""

    engine: Engine
    tokenizer: Tokenizer | None
    encoder: PromptEncoder
    starter: GenerationStarter
    bodies: BodyReader
    settings: AppSettings
    journaling: Journaling | None


def create_app(
    engine: Engine,
    tokenizer: Tokenizer | None,
    settings: AppSettings,
    *,
    chat_template: ChatTemplate | None = None,
    journaling: Journaling | None = None,
    registry: Registry | None = None,
    recorder: SpanRecorder | None = None,
) -> ASGIApp:
    """Return the application that serves `engine`.

    `tokenizer`: None if the model has none; then prompts must be token ids, and texts are empty. Without
    `journaling`, `Idempotency-Key` means nothing. `registry` is where it counts; `recorder` makes spans of requests.
    """
    registry = Registry() if registry is None else registry
    encoder = PromptEncoder(engine.model, tokenizer, chat_template)
    starter = GenerationStarter(
        engine,
        encoder,
        tokenizer,
        settings.model_names,
        journaling=journaling,
        timeout_s=settings.request_timeout_s,
        keep_alive_s=settings.keep_alive_s,
        prefix_cache=settings.prefix_cache,
        registry=registry,
    )
    if journaling is not None:
        journaling.resume_with(starter.resume)
    parts = _Parts(
        engine=engine,
        tokenizer=tokenizer,
        encoder=encoder,
        starter=starter,
        bodies=BodyReader(settings.max_body_bytes, settings.client_timeout_s),
        settings=settings,
        journaling=journaling,
    )
    app = FastAPI(title="purefill", version=version("purefill"), docs_url=None, redoc_url=None)
    _add_error_handlers(app)
    # Onto the application itself: routers that it includes cost each request a search.
    _add_generation_routes(app, parts)
    route_directly(app, BODIES)
    _add_model_routes(app, parts)
    _add_token_routes(app, parts)
    _add_service_routes(app, engine, journaling)
    if settings.serves_metrics:
        _add_metrics_route(app, engine)
    _add_docs(app)
    add_ui_routes(app)
    bounded = OpenRequests(
        app,
        max_requests=settings.max_concurrent_requests,
        max_body_bytes=max(_OPEN_BODY_BYTES, _OPEN_BODIES * settings.max_body_bytes),
    )
    guarded = KeyGuard(bounded, ApiKeys(settings.api_keys), (*OPEN_PATHS, *UI_PATHS))
    asgi: ASGIApp = RequestLog(guarded, registry, recorder)
    if settings.cors_origins:
        asgi = CORSMiddleware(
            asgi,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After", KEY_HEADER, REPLAYED_HEADER],
        )
    return asgi


def _add_generation_routes(app: FastAPI, parts: _Parts) -> None:
    """Add the routes that compute tokens, and the one that stops them."""

    def ticket_of(request: Request, value: Any) -> Ticket | None:
        key = request.headers.get(KEY_HEADER)
        # Without a journal that outlives this process, only a client's own key is worth anything.
        if parts.journaling is None or (key is None and not parts.journaling.is_durable):
            return None
        return make_ticket(key, key_digest=request.state.key_digest, path=request.url.path, value=value)

    async def generate(model: type[GenerationRequest], request: Request) -> Response:
        value = await parts.bodies.read(request)
        body: GenerationRequest = parse_as(value, model)
        ticket = ticket_of(request, value)
        generation = await parts.starter.start(body, request.state.key_digest, ticket)
        request.state.answer_id = generation.answer_id
        request.state.timeline = generation.timeline
        if parts.settings.log_prompts:
            log_prompt(generation.answer_id, body.model_dump(include={"prompt", "messages"}))
        if body.stream:
            return EventStream(generation.frames(), generation.close, generation.headers)
        try:
            answer = await until_disconnect(request.receive, generation.answer())
        finally:
            await generation.close()
        return Response(answer, media_type="application/json", headers=dict(generation.headers))

    @app.post(
        "/v1/completions",
        response_model=CompletionResponse,
        responses=ERRORS | stream_of(CompletionResponse),
        openapi_extra=body_of(CompletionRequest) | KEYED,
    )
    async def create_completion(request: Request) -> Response:
        """Complete each prompt, as one answer or as a stream of server-sent events."""
        return await generate(CompletionRequest, request)

    @app.post(
        "/v1/chat/completions",
        response_model=ChatResponse,
        responses=ERRORS | stream_of(ChatChunk),
        openapi_extra=body_of(ChatRequest) | KEYED,
    )
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation, as one answer or as a stream of server-sent events."""
        return await generate(ChatRequest, request)

    @app.delete("/v1/requests/{completion_id}", responses=ERRORS)
    async def delete_request(completion_id: str, request: Request) -> DeletedRequest:
        """Cancel a completion or chat that runs, by the `id` of its answer or of its chunks."""
        num_sequences = await parts.engine.abort(completion_id, request.state.key_digest)
        if num_sequences == 0:
            raise RequestNotFoundError(f"no request {completion_id} is running", param="completion_id")
        return DeletedRequest(id=completion_id)


def _add_model_routes(app: FastAPI, parts: _Parts) -> None:
    """Add the routes that say what is served."""
    created = int(time.time())
    cards = {
        name: ModelCard(id=name, created=created, max_model_len=parts.engine.model.max_model_len)
        for name in parts.settings.model_names
    }

    @app.get("/v1/models", responses=ERRORS)
    async def list_models() -> ModelList:
        """List the names of the served model."""
        return ModelList(data=list(cards.values()))

    @app.get("/v1/models/{model_id:path}", responses=ERRORS)
    async def retrieve_model(model_id: str) -> ModelCard:
        """Return one of the names of the served model."""
        if model_id not in cards:
            raise ModelNotFoundError(
                f"model {shorten(model_id)} is not served here; served: {', '.join(cards)}", param="model"
            )
        return cards[model_id]


def _add_token_routes(app: FastAPI, parts: _Parts) -> None:
    """Add the routes of the tokenizer."""

    def tokenizer_for(model: str | None) -> Tokenizer:
        parts.starter.check_model(model)
        if parts.tokenizer is None:
            raise InvalidRequestError("the served model has no tokenizer", param="model")
        return parts.tokenizer

    @app.post("/tokenize", responses=ERRORS, openapi_extra=body_of(TokenizeTextRequest, TokenizeChatRequest))
    async def tokenize(request: Request) -> TokenizeResponse:
        """Return the tokens of a text, or of a conversation in the model's chat template."""
        value = await parts.bodies.read(request)
        body: TokenizeTextRequest | TokenizeChatRequest
        if isinstance(value, dict) and value.get("messages") is not None:
            body = parse_as(value, TokenizeChatRequest)
            tokenizer = tokenizer_for(body.model)
            tokens = await parts.encoder.encode_chat(body)
        else:
            body = parse_as(value, TokenizeTextRequest)
            tokenizer = tokenizer_for(body.model)
            (tokens,) = await parts.encoder.encode_texts(
                [body.prompt], "prompt", add_special_tokens=body.add_special_tokens
            )
        texts = [tokenizer.token_bytes(i).decode(errors="replace") for i in tokens]
        return TokenizeResponse(
            count=len(tokens),
            max_model_len=parts.engine.model.max_model_len,
            tokens=list(tokens),
            token_strs=texts if body.return_token_strs else None,
        )

    @app.post("/detokenize", responses=ERRORS, openapi_extra=body_of(DetokenizeRequest))
    async def detokenize(request: Request) -> DetokenizeResponse:
        """Return the text of tokens."""
        body = await parts.bodies.parse(request, DetokenizeRequest)
        tokenizer = tokenizer_for(body.model)
        if len(body.tokens) > (most := parts.engine.model.max_model_len):
            raise InvalidRequestError(
                f"tokens must hold at most {most} token ids, the model's context length, got {len(body.tokens)}",
                param="tokens",
            )
        check_vocabulary(tuple(body.tokens), parts.engine.model, "tokens", "tokens")
        text = await tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
        return DetokenizeResponse(prompt=text)


def _add_service_routes(app: FastAPI, engine: Engine, journaling: Journaling | None) -> None:
    """Add the routes for those who run the service."""

    # Some benchmark clients ask with HEAD whether there is anything to get.
    @app.head("/health", include_in_schema=False)
    @app.get("/health", response_class=Response, responses=ERRORS)
    async def health() -> Response:
        """Answer 200 while the process serves, 503 once it knows that the scheduler is gone."""
        await engine.check_health()
        return Response()

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", responses=ERRORS)
    async def ready() -> ReadyResponse:
        """Answer 200 while all workers live and, if there is anything to do, make progress; 503 with the reason.

        503 too while the journal is away and new requests are refused for that.
        """
        if journaling is not None:
            journaling.check_ready()
        await engine.check_ready()
        return ReadyResponse(journal="memory" if journaling is None else journaling.state)

    @app.get("/load", responses=ERRORS)
    async def load() -> LoadResponse:
        """Return how much the service has to do."""
        state = await engine.load()
        return LoadResponse(
            server_load=state.num_live,
            queue_requests=state.num_waiting,
            queue_tokens=state.num_waiting_tokens,
        )

    @app.get("/status", responses=ERRORS)
    async def status() -> StatusResponse:
        """Return what the service and its actors do, in one look."""
        state = await engine.status()
        return StatusResponse(
            ready=state.problem is None,
            problem=state.problem,
            version=version("purefill"),
            model=engine.model.name,
            live_requests=state.load.num_live,
            queue_requests=state.load.num_waiting,
            queue_tokens=state.load.num_waiting_tokens,
            actors=[ActorState.model_validate(asdict(actor)) for actor in state.actors],
        )

    @app.post("/reset_prefix_cache", responses=ERRORS)
    async def reset_prefix_cache() -> ResetPrefixCacheResponse:
        """Forget all cached KV. What runs goes on with what it has."""
        return ResetPrefixCacheResponse(num_blocks=await engine.reset_prefix_cache())

    @app.get("/version")
    async def show_version() -> VersionResponse:
        """Return the version of purefill."""
        return VersionResponse(version=version("purefill"))


def metrics_app(engine: Engine) -> ASGIApp:
    """Return an application that only answers ``/metrics``, for a port of its own."""
    app = FastAPI(title="purefill", docs_url=None, redoc_url=None, openapi_url=None)
    _add_error_handlers(app)
    _add_metrics_route(app, engine)
    return app


def _add_metrics_route(app: FastAPI, engine: Engine) -> None:
    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return the metrics of the service in Prometheus' text format."""
        return Response(await engine.metrics(), media_type=MEDIA_TYPE)


def _add_docs(app: FastAPI) -> None:
    """Serve the schema, with the bodies that the routes read themselves, and a page that shows it."""
    app.openapi = lambda: openapi_schema(app)  # type: ignore[method-assign]

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(app.openapi()))


def _add_error_handlers(app: FastAPI) -> None:
    """Give every error OpenAI's body."""

    @app.exception_handler(RequestError)
    async def on_request_error(request: Request, error: RequestError) -> JSONResponse:
        if error.status >= 500:
            logger.error("%s: %s", error.label, error.message)
        request.state.error_label = error.label
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{error.detail}: {request.method} {shorten(request.url.path)}"
        info = ErrorInfo(message=message, type="invalid_request_error", param=None, code=None)
        return JSONResponse(
            ErrorResponse(error=info).model_dump(), status_code=error.status_code, headers=error.headers
        )

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> JSONResponse:
        # The server logs the error with its traceback; the client must not see it.
        return JSONResponse(INTERNAL_ERROR.model_dump(), status_code=500)
