"""The requests that one ApiServer serves at once: how many, and how much of their bodies it holds."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scheduler.api.errors import error_response
from scheduler.errors import OverloadedError

_RETRY_AFTER_S = 1.0


class OpenRequests:
    """ASGI middleware: answers 429 to a POST while there are too many, from its first line to its last byte.

    What a request holds in memory is bounded by its body, so all bodies together are bounded too. Requests without a
    body, as probes and scrapes are, always pass.
    """

    def __init__(self, app: ASGIApp, *, max_requests: int, max_body_bytes: int) -> None:
        """`max_body_bytes`: of the bodies of all open requests together."""
        self._app = app
        self._max_requests = max_requests
        self._max_body_bytes = max_body_bytes
        self._num_requests = 0
        self._num_body_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._num_requests >= self._max_requests:
            error = OverloadedError(
                f"an API server must have at most {self._max_requests} requests at once",
                retry_after_s=_RETRY_AFTER_S,
            )
            scope.setdefault("state", {})["error_label"] = error.label
            await error_response(error)(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            size = len(message.get("body", b""))
            num_bytes += size
            self._num_body_bytes += size
            if self._num_body_bytes > self._max_body_bytes:
                raise OverloadedError(
                    f"the bodies of all requests at an API server must have at most {self._max_body_bytes} bytes "
                    "together",
                    retry_after_s=_RETRY_AFTER_S,
                )
            return message

        self._num_requests += 1
        try:
            await self._app(scope, counted, send)
        finally:
            self._num_requests -= 1
            self._num_body_bytes -= num_bytes
