"""Answers that end when the client goes: server-sent events, and the watch over the connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from scheduler.api.errors import INTERNAL_ERROR, error_body
from scheduler.errors import RequestCancelledError, RequestError

T = TypeVar("T")

logger = logging.getLogger(__name__)

_DONE = b"data: [DONE]\n\n"


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`. If the client goes first, cancel it and raise RequestCancelledError.

    The request's body must have been read.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise RequestCancelledError("the client closed the connection")
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends the frames of server-sent events, then ``data: [DONE]``.

    An error on the way becomes an event with OpenAI's error body, before the ``[DONE]``. `close` is called at
    the end, however it comes: the last event, an error, or a client that went away.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[str],
        close: Callable[[], Awaitable[None]],
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._frames = frames
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the last one, or until the client goes."""
        try:
            await until_disconnect(receive, self._send_all(send))
        except RequestCancelledError:
            logger.debug("the client closed the stream")
        finally:
            await self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with aclosing(self._frames) as frames:
                async for frame in frames:
                    await send({"type": "http.response.body", "body": frame.encode(), "more_body": True})
            end = _DONE
        except RequestError as error:
            if error.status >= 500:
                logger.error("a stream failed: %s", error.message)
            end = _error_frame(error_body(error).model_dump_json(ensure_ascii=True)) + _DONE
        except Exception:
            logger.exception("a stream failed")
            end = _error_frame(INTERNAL_ERROR.model_dump_json(ensure_ascii=True)) + _DONE
        await send({"type": "http.response.body", "body": end, "more_body": False})


def _error_frame(body: str) -> bytes:
    return f"data: {body}\n\n".encode()
