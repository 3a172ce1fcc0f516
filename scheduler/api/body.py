"""Reading the body of a request: how large, how slow, and what it must be."""

from __future__ import annotations

import asyncio
import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from scheduler.api.errors import validation_error
from scheduler.errors import BodyTimeoutError, BodyTooLargeError, InvalidRequestError, RequestCancelledError

M = TypeVar("M", bound=BaseModel)


class BodyReader:
    """Reads bodies of at most some size."""

    def __init__(self, max_bytes: int, timeout_s: float) -> None:
        """`timeout_s`: longest that a client may take to send its body."""
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def read(self, request: Request) -> Any:
        """Return the value of a JSON body. Raises RequestError."""
        content_type = (
            request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        )
        if content_type != "application/json" and not content_type.endswith("+json"):
            raise InvalidRequestError(
                "the body must be a JSON object, sent with Content-Type: application/json"
            )
        content = await self._content(request)
        try:
            return json.loads(content)
        except json.JSONDecodeError as error:
            raise InvalidRequestError(
                f"the body is not valid JSON: {error.msg} at character {error.pos}"
            ) from None
        except (ValueError, RecursionError) as error:  # not UTF-8, a number of too many digits, too deep
            raise InvalidRequestError(f"the body is not valid JSON: {error}") from None

    async def parse(self, request: Request, model: type[M]) -> M:
        """Return the body as what it must be. Raises RequestError."""
        return parse_as(await self.read(request), model)

    async def _content(self, request: Request) -> bytes:
        # What the client says beforehand saves both sides the transfer.
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            raise self._too_large()
        parts, num_bytes, more = [], 0, True
        try:
            async with asyncio.timeout(self._timeout_s):
                while more:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise RequestCancelledError("the client closed the connection")
                    parts.append(message.get("body", b""))
                    num_bytes += len(parts[-1])
                    more = message.get("more_body", False)
                    if num_bytes > self._max_bytes:
                        raise self._too_large()
        except TimeoutError:
            raise BodyTimeoutError(f"the body did not come within {self._timeout_s:g} s") from None
        return b"".join(parts)

    def _too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(f"the body must have at most {self._max_bytes} bytes")


def parse_as(value: Any, model: type[M]) -> M:
    """Return a JSON value as what it must be. Raises InvalidRequestError, which names the first wrong field."""
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object, sent with Content-Type: application/json")
    try:
        try:
            return model.model_validate(value)
        except ValidationError as error:
            raise validation_error(error.errors(include_url=False)) from None
    except RecursionError:  # what could be read is not always shallow enough to be written into a message
        raise InvalidRequestError("the body is nested too deeply") from None
