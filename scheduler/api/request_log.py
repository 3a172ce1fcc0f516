"""Request ids: each request has one, which its answer and every line of the log about it carry."""

from __future__ import annotations

import json
import logging
import random
import re
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scheduler.observe import catalogue as m
from scheduler.observe.registry import Registry
from scheduler.observe.requests import RequestTimeline
from scheduler.observe.traces import SpanRecorder

REQUEST_ID_HEADER = b"x-request-id"

_current: ContextVar[str] = ContextVar("request_id", default="-")
_MAX_PATH_CHARS = 256
_VALID = re.compile(rb"[\x21-\x7e]{1,128}")

_GENERATION_PATHS = ("/v1/completions", "/v1/chat/completions")
_CLIENT_GONE = 499
"""Counted for a request to which nothing was answered."""

logger = logging.getLogger(__name__)


class RequestLog:
    """ASGI middleware: takes `X-Request-Id` from the client or makes one and sends it back.

    Each request is logged and counted, and spans are made of it, when it has ended.
    """

    def __init__(self, app: ASGIApp, registry: Registry, recorder: SpanRecorder | None = None) -> None:
        self._app = app
        self._registry = registry
        self._recorder = recorder

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
            self._count(scope, status)
            state = scope.get("state", {})
            _log_line(scope, status, time.perf_counter() - started, state)
            if self._recorder is not None and (timeline := state.get("timeline")) is not None:
                self._recorder.record(
                    timeline,
                    name=f"{scope['method']} {scope['path']}",
                    answer_id=state["answer_id"],
                    status=status or _CLIENT_GONE,
                    headers={
                        name.decode(): value.decode("latin-1")
                        for name, value in scope["headers"]
                        if name in (b"traceparent", b"tracestate")
                    },
                )

    def _count(self, scope: Scope, status: int) -> None:
        route = scope.get("route")
        # Paths that nothing serves are for clients to choose: a series for each would be one too many.
        path = "other" if route is None else route.path
        self._registry.inc(m.HTTP_REQUESTS, path, str(status or _CLIENT_GONE))
        state = scope.get("state", {})
        if scope["path"] in _GENERATION_PATHS and "timeline" not in state and "error_label" in state:
            self._registry.inc(m.REJECTIONS, state["error_label"])


def _log_line(scope: Scope, status: int, seconds: float, state: Mapping[str, Any]) -> None:
    """Log a request: what was asked for and answered, and of one that computed tokens, how many and where time went."""
    # A path may hold line ends.
    fields: dict[str, Any] = {
        "method": scope["method"],
        "path": quote(scope["path"][:_MAX_PATH_CHARS]),
        "status": status,
        "seconds": round(seconds, 6),
    }
    text = "{method} {path} {status} {seconds:.3f} s"
    timeline: RequestTimeline | None = state.get("timeline")
    if timeline is not None:
        waits, first_token_s = timeline.waits, timeline.first_token_s
        fields |= {
            "id": state["answer_id"],
            "outcome": timeline.outcome,
            "prompt_tokens": timeline.num_prompt_tokens,
            "output_tokens": timeline.num_output_tokens,
            "queued_s": round(waits.queued_s, 6),
            "held_s": round(waits.held_s, 6),
            "prefill_s": round(waits.prefill_s, 6),
            "handoff_s": round(waits.handoff_s, 6),
            "first_token_s": None if first_token_s is None else round(first_token_s, 6),
        }
        text += " {id} {outcome}, {prompt_tokens} + {output_tokens} tokens"
        if first_token_s is not None:
            text += (
                ", queued {queued_s:.3f} s, held {held_s:.3f} s, prefill {prefill_s:.3f} s, "
                "handoff {handoff_s:.3f} s, first token after {first_token_s:.3f} s"
            )
    elif "error_label" in state:
        fields["outcome"] = state["error_label"]
        text += " {outcome}"
    logger.info("%s", text.format(**fields), extra={"fields": fields})


def log_prompt(answer_id: str, prompt: Mapping[str, Any]) -> None:
    """Log what was asked for, in one line. Only for those who set `log_prompts`."""
    text = json.dumps(prompt, ensure_ascii=True)
    logger.info("prompt of %s: %s", answer_id, text, extra={"fields": {"id": answer_id, **prompt}})


class RequestIdFilter(logging.Filter):
    """Gives log records the id of the request that they are about, as `request_id`."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass."""
        record.request_id = _current.get()
        return True
