"""Request ids: each request has one, which its answer and every line of the log about it carry."""

from __future__ import annotations

import logging
import random
import re
import time
from contextvars import ContextVar
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID_HEADER = b"x-request-id"

_current: ContextVar[str] = ContextVar("request_id", default="-")
_MAX_PATH_CHARS = 256
_VALID = re.compile(rb"[\x21-\x7e]{1,128}")

logger = logging.getLogger(__name__)


class RequestLog:
    """ASGI middleware: takes `X-Request-Id` from the client or makes one, sends it back, and logs each request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == REQUEST_ID_HEADER), b"")
        # What a client sends goes into a header and into the log, so it must fit into a line of each.
        request_id = given if _VALID.fullmatch(given) else b"%032x" % random.getrandbits(128)
        _current.set(request_id.decode())
        started, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (REQUEST_ID_HEADER, request_id)]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            logger.info(
                "%s %s %d %.3f s %s",
                scope["method"],
                quote(scope["path"][:_MAX_PATH_CHARS]),  # it may hold line ends
                status,
                time.perf_counter() - started,
                scope.get("state", {}).get("answer_id", ""),
            )


class RequestIdFilter(logging.Filter):
    """Gives log records the id of the request that they are about, as `request_id`."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass."""
        record.request_id = _current.get()
        return True
