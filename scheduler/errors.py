"""Every error that purefill raises on purpose.

    PurefillError
    ├── ConfigError               a setting is wrong: one line on stderr, exit code 2
    ├── ModelFetchError           a model cannot be had: network, hash or conversion
    ├── RequestError              a request ends badly; `status` and `error_type` make the HTTP answer
    │   ├── InvalidRequestError        400  a field is wrong; names the field and its limit
    │   ├── AuthenticationError        401  no or wrong API key
    │   ├── PermissionDeniedError      403  the API key is known, but has no right to this
    │   ├── ModelNotFoundError         404  no such model
    │   ├── RequestNotFoundError       404  no such request runs
    │   ├── BodyTimeoutError           408  the client sends its body too slowly
    │   ├── BodyTooLargeError          413  the body is larger than this service takes
    │   ├── IdempotencyKeyError        422  the Idempotency-Key came before, with another body
    │   ├── OverloadedError            429  the queue is full; carries `retry_after_s`
    │   ├── RequestCancelledError      499  the client or an operator cancelled it
    │   ├── WorkerFailedError          500  the worker could not compute it
    │   ├── UnavailableError           503  starting, draining, or a part is down
    │   └── RequestTimeoutError        504  it took longer than this service gives a request
    ├── HandoffError              KV pages could not be brought to their decode worker
    └── StaleLeaseError           a KV page was touched under an epoch that is no longer its own

Each class has a stable `label`: metrics count by it and logs name it.
"""

from __future__ import annotations

from typing import ClassVar


class PurefillError(Exception):
    """Base of all errors of purefill."""

    label: ClassVar[str] = "internal"


class ConfigError(PurefillError):
    """A setting is wrong. The message is one line that names the setting and its limit."""

    label = "config"


class ModelFetchError(PurefillError):
    """A model cannot be downloaded or converted. The message is one line; trying again may help."""

    label = "model_fetch"


class HandoffError(PurefillError):
    """KV pages could not be brought to their decode worker: it died, or the way to it is broken."""

    label = "handoff_failed"


class StaleLeaseError(PurefillError):
    """A KV page was written or read under an epoch that is no longer its own."""

    label = "stale_lease"


class RequestError(PurefillError):
    """A request ends without its result.

    `status` is the HTTP status, `error_type` and `code` go into OpenAI's error body, `param` names the field.
    """

    label = "request"
    status: ClassVar[int] = 500
    error_type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(RequestError):
    """A field of the request is wrong, or the request can never run."""

    label = "invalid"
    status = 400
    error_type = "invalid_request_error"


class AuthenticationError(RequestError):
    """The request carries no API key, or one that is not known."""

    label = "authentication"
    status = 401
    error_type = "authentication_error"
    code = "invalid_api_key"


class PermissionDeniedError(RequestError):
    """The API key is known, but what it asks for belongs to another."""

    label = "permission_denied"
    status = 403
    error_type = "permission_error"
    code = "permission_denied"


class ModelNotFoundError(RequestError):
    """The request names a model that this service does not serve."""

    label = "model_not_found"
    status = 404
    error_type = "invalid_request_error"
    code = "model_not_found"


class RequestNotFoundError(RequestError):
    """No request of that id runs."""

    label = "request_not_found"
    status = 404
    error_type = "invalid_request_error"
    code = "request_not_found"


class BodyTimeoutError(RequestError):
    """The client took too long to send the body."""

    label = "body_timeout"
    status = 408
    error_type = "invalid_request_error"
    code = "body_timeout"


class BodyTooLargeError(RequestError):
    """The body of the request has more bytes than this service takes."""

    label = "body_too_large"
    status = 413
    error_type = "invalid_request_error"
    code = "body_too_large"


class IdempotencyKeyError(RequestError):
    """The `Idempotency-Key` of the request came before, with another body or path."""

    label = "idempotency_key"
    status = 422
    error_type = "invalid_request_error"
    code = "idempotency_key_reused"


class OverloadedError(RequestError):
    """The queue is full. `retry_after_s` says when to come back, in seconds."""

    label = "overloaded"
    status = 429
    error_type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestCancelledError(RequestError):
    """The client went away, or somebody cancelled the request."""

    label = "cancelled"
    status = 499
    error_type = "invalid_request_error"
    code = "request_cancelled"


class WorkerFailedError(RequestError):
    """A worker could not compute the request."""

    label = "worker_failed"


class UnavailableError(RequestError):
    """The service is starting, draining, or a part of it is down. `retry_after_s` says when to come back."""

    label = "unavailable"
    status = 503
    error_type = "service_unavailable"
    retry_after_s: ClassVar[float] = 5.0


class RequestTimeoutError(RequestError):
    """The request took longer than this service gives it."""

    label = "timeout"
    status = 504
    error_type = "timeout_error"
    code = "request_timeout"


def _request_errors(base: type[RequestError]) -> list[type[RequestError]]:
    return [base, *(cls for child in base.__subclasses__() for cls in _request_errors(child))]


def request_error(label: str, message: str) -> RequestError:
    """Make the `RequestError` whose label is `label`, as when an error crossed a process boundary."""
    classes = {cls.label: cls for cls in _request_errors(RequestError)}
    return classes.get(label, RequestError)(message)
