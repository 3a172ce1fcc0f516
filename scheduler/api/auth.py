"""API keys."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from scheduler.errors import AuthenticationError


class ApiKeys:
    """Knows the valid API keys, as digests. Without any, everybody may come in."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

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


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
