"""API keys: who may call what."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Iterable

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from scheduler.api.errors import error_response
from scheduler.errors import AuthenticationError


class ApiKeys:
    """Knows the valid API keys, as digests. Without any, everybody may come in."""

    def __init__(self, digests: Iterable[str]) -> None:
        """`digests` are those that `key_digest` makes of the keys."""
        self._digests = [bytes.fromhex(digest) for digest in digests]

    def check(self, authorization: str | None) -> str:
        """Return a name for the key in the value of the `Authorization` header, which does not tell the key.

        Raises AuthenticationError if it is not valid. Takes the same time for every wrong key.
        """
        if not self._digests:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise AuthenticationError("an API key is needed: send the header Authorization: Bearer KEY")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise AuthenticationError("the API key is not valid")
        return digest.hex()[:16]


class KeyGuard:
    """ASGI middleware: lets nobody without a valid key call anything but the open paths.

    Handlers find the name of the key as ``request.state.key_digest``.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: Collection[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or answer 401 before anything of its body is read."""
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            try:
                digest = self._keys.check(HTTPConnection(scope).headers.get("authorization"))
            except AuthenticationError as error:
                scope.setdefault("state", {})["error_label"] = error.label
                await error_response(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["key_digest"] = digest
        await self._app(scope, receive, send)


def key_digest(key: str) -> str:
    """Return what an ApiServer knows of a key: its SHA-256, in hexadecimal."""
    return _digest(key).hex()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
