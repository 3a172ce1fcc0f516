"""HTTP/1.1 on one connection: uvicorn's protocol, with limits on what a client sends and leaves unread.

uvicorn waits for ever for a request line and its headers, keeps what came of them and of trailers however much it is,
and lets any number of requests wait behind one. It also waits for ever for a client that reads nothing. Bodies have
their own limits (`scheduler.api.body`), but to get that far takes no API key.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from scheduler.api.connections import ConnectionLimits, Connections
from scheduler.api.service_protocol import ErrorInfo, ErrorResponse


class HttpProtocol(HttpToolsProtocol):
    """Owns one connection. Closes it if its client is too slow or sends too much; errors have OpenAI's body."""

    def __init__(
        self, *args: Any, limits: ConnectionLimits, all_connections: Connections, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._all = all_connections
        self._is_excess = False
        self._in_head = False
        self._in_message = False
        self._num_unused_bytes = 0
        """What came since the last byte of a body, or the last whole request: of a head, of trailers, of framing."""
        self._waits: dict[str, asyncio.TimerHandle] = {}
        self._problem: str | None = None
        self._serving: RequestResponseCycle | None = None
        """The request that is being answered. `cycle` is the last one that came, which may wait behind it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first head, or say that there are too many connections."""
        super().connection_made(transport)
        self._is_excess = not self._all.add(self)
        # A client that is told before it has sent anything may see its connection reset, and not the answer.
        self._wait_for(
            "head", self._limits.linger_s if self._is_excess else self._limits.client_timeout_s, self._on_slow
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._all.remove(self)
        for timer in self._waits.values():
            timer.cancel()
        self._waits.clear()
        self._tell_gone()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came. Most heads come whole, and then cost no timer."""
        if self._is_excess:
            if not self.transport.is_closing():
                message = f"this server must have at most {self._limits.max_connections} connections"
                self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, message)
            return
        self._num_unused_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_message and self._num_unused_bytes > self._limits.max_head_bytes:
            limit = f"request line and headers, or trailers, must have at most {self._limits.max_head_bytes} bytes"
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, limit)
        elif self._in_head or (self._is_idle and not self._in_message):
            # What comes stops uvicorn's own timer, also if it begins no request, or ends one that was answered.
            if "head" not in self._waits:
                self._wait_for("head", self._limits.client_timeout_s, self._on_slow)
        else:
            self._stop_waiting_for("head")

    # The parser.

    def on_message_begin(self) -> None:
        """A head begins."""
        self._in_head = self._in_message = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. Trailers are not read by anybody."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A head is complete."""
        self._in_head = False
        if len(self.pipeline) >= self._limits.max_pipelined:
            self._problem = f"at most {self._limits.max_pipelined} requests may wait on a connection"
            raise ValueError(self._problem)  # stops the parser
        self._all.set_busy(self)
        super().on_headers_complete()
        if self.parser.should_upgrade():
            # No other protocol is spoken here. The request is answered, but what follows it might be in another one.
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """Take a part of a body."""
        self._num_unused_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request is complete."""
        self._in_message = False
        self._num_unused_bytes = 0
        self._stop_waiting_for("rest")
        super().on_message_complete()

    def _should_upgrade(self) -> bool:
        return False

    def _unsupported_upgrade_warning(self) -> None:
        """Whoever asks for another protocol must not fill the log."""

    # The answers.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Serve a request."""
        self._serving = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Wait for the next request, but not for the rest of the one that was answered."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_later()
        elif self._is_idle:
            self._all.set_idle(self)
            if self._in_message and not self._in_head:
                self._wait_for("rest", self._limits.linger_s, self._close)

    def pause_writing(self) -> None:
        """The client does not read what it is sent."""
        self._wait_for("reading", self._limits.client_timeout_s, self._abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        """It has read most of it."""
        self._stop_waiting_for("reading")
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, and close."""
        self._refuse(HTTPStatus.BAD_REQUEST, self._problem or msg)

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection on which nothing came for long."""
        self._close()

    def drop(self) -> None:
        """Close it for another one."""
        self._close()

    @property
    def _is_idle(self) -> bool:
        """Whether no request is being served."""
        return self._serving is None or self._serving.response_complete

    def _on_slow(self) -> None:
        if self._in_head and self._is_idle:
            self._refuse(
                HTTPStatus.REQUEST_TIMEOUT,
                f"request line and headers did not come within {self._limits.client_timeout_s:g} s",
            )
        else:
            self._close()

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Answer with an error and close, unless that would end up in the middle of another answer."""
        if self._serving is not None and self._serving.response_started and not self._is_idle:
            self._abort()
            return
        is_theirs = status < HTTPStatus.INTERNAL_SERVER_ERROR
        info = ErrorInfo(
            message=message,
            type="invalid_request_error" if is_theirs else "service_unavailable",
            param=None,
            code=None,
        )
        body = ErrorResponse(error=info).model_dump_json(ensure_ascii=True)
        lines = [
            f"HTTP/1.1 {status.value} {status.phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
            *([] if is_theirs else ["retry-after: 1"]),
            "",
            body,
        ]
        self.transport.write("\r\n".join(lines).encode())
        self._close()

    def _close(self) -> None:
        """Close the connection once what was written is sent, or after a while."""
        self._tell_gone()
        self.transport.close()
        self._abort_later()

    def _abort_later(self) -> None:
        self._wait_for("closing", self._limits.linger_s, self._abort)

    def _abort(self) -> None:
        self._tell_gone()
        self.transport.abort()

    def _tell_gone(self) -> None:
        """Tell the request that is being answered that its client is gone. uvicorn tells the last one that came."""
        if self._serving is not None and not self._serving.response_complete:
            self._serving.disconnected = True
            self._serving.message_event.set()

    def _wait_for(self, what: str, seconds: float, then: Any) -> None:
        self._stop_waiting_for(what)
        self._waits[what] = self.loop.call_later(seconds, then)

    def _stop_waiting_for(self, what: str) -> None:
        timer = self._waits.pop(what, None)
        if timer is not None:
            timer.cancel()
