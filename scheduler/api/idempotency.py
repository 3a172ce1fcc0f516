"""`Idempotency-Key`: by what a client that asks again is told from one that asks for something new."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from typing import Any

from scheduler.errors import InvalidRequestError

KEY_HEADER = "Idempotency-Key"
REPLAYED_HEADER = "Idempotent-Replayed"
MAX_KEY_CHARS = 255

_BODY = json.JSONEncoder(separators=(",", ":"), sort_keys=True)
_KEY = re.compile(rf"[\x21-\x7e]{{1,{MAX_KEY_CHARS}}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """By what a request is known in the journal."""

    key: str
    is_keyed: bool
    """Whether the client chose the key."""
    entry_id: str
    key_digest: str
    """Stands for the API key: the same key of another API key's client is another entry."""
    path: str
    body: str
    fingerprint: str
    """Of path and body."""


def make_ticket(given: str | None, *, key_digest: str, path: str, value: Any) -> Ticket:
    """Return the ticket of a request with the JSON body `value`; without a `given` key it gets one of ours.

    Raises InvalidRequestError if the key is none that we take.
    """
    if given is not None and not _KEY.fullmatch(given):
        raise InvalidRequestError(
            f"{KEY_HEADER} must have 1 to {MAX_KEY_CHARS} visible ASCII characters, got {len(given)} characters",
            param=KEY_HEADER,
        )
    key = os.urandom(16).hex() if given is None else given
    body = _BODY.encode(value)
    return Ticket(
        key=key,
        is_keyed=given is not None,
        entry_id=_digest(key_digest, key),
        key_digest=key_digest,
        path=path,
        body=body,
        fingerprint=_digest(path, body),
    )


def _digest(*parts: str) -> str:
    """Return a name for these texts, which does not tell them. None of them has a NUL."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]
