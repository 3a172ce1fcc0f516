"""The one place where errors become OpenAI's error body."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse

from scheduler.api.fields import shorten
from scheduler.api.service_protocol import ErrorInfo, ErrorResponse
from scheduler.errors import (
    InvalidRequestError,
    OverloadedError,
    RequestError,
    UnavailableError,
    WorkerFailedError,
    request_error,
)
from scheduler.messages import Rejection

INTERNAL_ERROR = ErrorResponse(
    error=ErrorInfo(message="Internal server error", type="server_error", param=None, code=None)
)

_MESSAGES: Mapping[str, str] = {
    "bool_type": "must be true or false",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "greater_than": "must be > {gt}",
    "greater_than_equal": "must be >= {ge}",
    "int_from_float": "must be an integer",
    "int_type": "must be an integer",
    "less_than": "must be < {lt}",
    "less_than_equal": "must be <= {le}",
    "model_attributes_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "model_type": "must be an object",
    "string_pattern_mismatch": "must match {pattern}",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must not be empty",
    "too_long": "must hold at most {max_length} items",
    "too_short": "must not be empty",
    "string_type": "must be a string",
}
"""Our words for pydantic's error types."""


def error_body(error: RequestError) -> ErrorResponse:
    """Return OpenAI's error body. What failed inside a worker is for the log, not for the client."""
    if isinstance(error, WorkerFailedError):
        return INTERNAL_ERROR
    return ErrorResponse(
        error=ErrorInfo(message=error.message, type=error.error_type, param=error.param, code=error.code)
    )


def error_response(error: RequestError) -> JSONResponse:
    """Return the HTTP answer. 429 and 503 say in `Retry-After`, in whole seconds, when to come back."""
    headers = {}
    if isinstance(error, OverloadedError | UnavailableError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error).model_dump(), status_code=error.status, headers=headers)


def rejection_error(rejection: Rejection) -> RequestError:
    """Return the error that a scheduler's rejection stands for."""
    error = request_error(rejection.label, rejection.message)
    error.param = rejection.param
    if isinstance(error, OverloadedError) and rejection.retry_after_s is not None:
        error.retry_after_s = rejection.retry_after_s
    return error


def validation_error(details: Sequence[Mapping[str, Any]]) -> InvalidRequestError:
    """Return the error for a body that pydantic refused: it names the first field at fault and its limit."""
    detail = details[0]
    name = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "missing":
        return InvalidRequestError(f"{name} must be provided and non-empty", param=name)
    template = _MESSAGES.get(detail["type"])
    if template is None:
        return InvalidRequestError(f"{name} {detail['msg']}", param=name)
    message = template.format(**detail.get("ctx", {}))
    return InvalidRequestError(f"{name} {message}, got {shorten(detail['input'])}", param=name)
