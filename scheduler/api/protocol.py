"""HTTP/1.1 on one connection: uvicorn's protocol, with limits on the heads of requests.

uvicorn waits for ever for a request line and its headers, and keeps what came of them however much it is. Bodies
have their own limits (`scheduler.api.body`), but to get that far takes no API key.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from scheduler.api.service_protocol import ErrorInfo, ErrorResponse


class HttpProtocol(HttpToolsProtocol):
    """Owns one connection. Closes it if a head does not come in time, or is too large; errors have OpenAI's body."""

    max_head_bytes: ClassVar[int] = 65_536
    """Most of a head that is kept while its end has not come. One that comes at once may have a little more."""
    head_timeout_s: ClassVar[float] = 60.0
    """Longest that a client may take from connecting to the end of its first head, and for each later one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = False
        self._num_head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first head."""
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._on_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came. Most heads come whole, and then cost no timer."""
        super().data_received(data)
        if self.transport.is_closing():
            return
        if not self._in_head:
            self._num_head_bytes = 0
            self._stop_timer()
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > self.max_head_bytes:
            limit = f"request line and headers must have at most {self.max_head_bytes} bytes"
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, limit)
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._on_timeout)

    def on_message_begin(self) -> None:
        """A head begins."""
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """A head is complete."""
        self._in_head = False
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, and close."""
        self._refuse(HTTPStatus.BAD_REQUEST, msg)

    def _on_timeout(self) -> None:
        if self._in_head:
            self._refuse(
                HTTPStatus.REQUEST_TIMEOUT,
                f"request line and headers did not come within {self.head_timeout_s:g} s",
            )
        else:
            self.transport.close()

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        info = ErrorInfo(message=message, type="invalid_request_error", param=None, code=None)
        body = ErrorResponse(error=info).model_dump_json(ensure_ascii=True)
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write((head + body).encode())
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
