"""The FastAPI application: routes and error answers over an engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from scheduler.api.auth import ApiKeys
from scheduler.api.completions import CompletionStarter
from scheduler.api.engine import Engine
from scheduler.api.errors import INTERNAL_ERROR, error_response, validation_error
from scheduler.api.protocol import (
    CompletionRequest,
    CompletionResponse,
    DeletedRequest,
    ErrorInfo,
    ErrorResponse,
    ModelCard,
    ModelList,
)
from scheduler.api.sse import EventStream, until_disconnect
from scheduler.api.tokenizer import Tokenizer
from scheduler.errors import RequestError, RequestNotFoundError

METRICS_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

logger = logging.getLogger(__name__)


def create_app(
    engine: Engine,
    tokenizer: Tokenizer | None,
    *,
    model_names: Sequence[str],
    api_keys: Sequence[str] = (),
) -> FastAPI:
    """Return the application that serves `engine` under these model names.

    `tokenizer`: None if the model has none; then prompts must be token ids, and texts are empty. `api_keys`:
    who calls `/v1/...` must send one of them; none: everybody may.
    """
    app = FastAPI(title="purefill", docs_url=None, redoc_url=None)
    _add_error_handlers(app)
    app.include_router(_service_routes(engine))
    app.include_router(_openai_routes(engine, tokenizer, model_names, ApiKeys(api_keys)))
    return app


def _openai_routes(
    engine: Engine, tokenizer: Tokenizer | None, model_names: Sequence[str], keys: ApiKeys
) -> APIRouter:
    """Return the routes under `/v1`."""

    async def authenticate(request: Request, authorization: Annotated[str | None, Header()] = None) -> None:
        request.state.key_digest = keys.check(authorization)

    starter = CompletionStarter(engine, tokenizer, model_names)
    created = int(time.time())
    router = APIRouter(
        prefix="/v1", dependencies=[Depends(authenticate)], responses={"4XX": {"model": ErrorResponse}}
    )

    @router.post("/completions", response_model=CompletionResponse)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Complete each prompt, as one answer or as a stream of server-sent events."""
        completion = await starter.start(body, request.state.key_digest)
        if body.stream:
            return EventStream(completion.chunks(), completion.close)
        try:
            result = await until_disconnect(request.receive, completion.result())
        finally:
            await completion.close()
        return Response(result.model_dump_json(), media_type="application/json")

    @router.delete("/requests/{completion_id}")
    async def delete_request(completion_id: str) -> DeletedRequest:
        """Cancel a completion that runs, by the `id` of its answer or of its chunks."""
        num_sequences = await engine.abort(completion_id)
        if num_sequences == 0:
            raise RequestNotFoundError(f"no request {completion_id} is running", param="completion_id")
        return DeletedRequest(id=completion_id)

    @router.get("/models")
    async def list_models() -> ModelList:
        """List the names of the served model."""
        max_model_len = engine.model.max_model_len
        return ModelList(
            data=[ModelCard(id=name, created=created, max_model_len=max_model_len) for name in model_names]
        )

    return router


def _service_routes(engine: Engine) -> APIRouter:
    """Return the routes for those who run the service."""
    router = APIRouter(responses={503: {"model": ErrorResponse}})

    # Some benchmark clients ask with HEAD whether there is anything to get.
    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    async def health() -> Response:
        """Answer 200 while the process serves, 503 once it knows that the scheduler is gone."""
        await engine.check_health()
        return Response()

    @router.head("/metrics", include_in_schema=False)
    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return the metrics of the service in Prometheus' text format."""
        return Response(await engine.metrics(), media_type=METRICS_MEDIA_TYPE)

    return router


def _add_error_handlers(app: FastAPI) -> None:
    """Give every error OpenAI's body."""

    @app.exception_handler(RequestError)
    async def on_request_error(request: Request, error: RequestError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def on_invalid_body(request: Request, error: RequestValidationError) -> JSONResponse:
        return error_response(validation_error(error.errors()))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{error.detail}: {request.method} {request.url.path}"
        info = ErrorInfo(message=message, type="invalid_request_error", param=None, code=None)
        return JSONResponse(
            ErrorResponse(error=info).model_dump(), status_code=error.status_code, headers=error.headers
        )

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> JSONResponse:
        # The server logs the error with its traceback; the client must not see it.
        return JSONResponse(INTERNAL_ERROR.model_dump(), status_code=500)
