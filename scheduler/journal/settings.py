"""Where the journal is, as the command line says it. Imports nothing that takes long."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import unquote, urlsplit

MEMORY = "memory"
JOURNAL_FORMS = (
    "memory, redis://HOST:PORT, redis+cluster://HOST:PORT or redis+sentinel://HOST:PORT,.../SERVICE"
)
_SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel")


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalConfig:
    """Where accepted requests are kept, for how long, and what happens if that place cannot be reached."""

    url: str = field(default=MEMORY, repr=False)
    """``memory``, or the URL of a Redis; it may hold a password."""
    ttl_s: float = 86_400.0
    """How long an entry is kept after the last that was written to it."""
    on_failure: Literal["refuse", "continue"] = "refuse"
    """What happens to new requests while the journal cannot be reached."""


def check_journal_url(url: str) -> None:
    """Raise ValueError if this is not the URL of a Redis that a journal can be kept in."""
    scheme, separator, rest = url.partition("://")
    if scheme not in _SCHEMES or not separator or not rest:
        raise ValueError(f"must be {JOURNAL_FORMS}; with rediss for TLS")
    if scheme.endswith("sentinel"):
        sentinel_parts(url)


def host_of(url: str) -> str:
    """Return what a log may say of a journal's URL: everything but user, password and options."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"


def sentinel_parts(url: str) -> tuple[list[tuple[str, int]], str, int, str | None, str | None]:
    """Return hosts, service, database, user and password. Raises ValueError."""
    split = urlsplit(url)
    credentials, _, names = split.netloc.rpartition("@")
    path = re.fullmatch(r"/([^/]+)(?:/(\d+))?", split.path)
    hosts = [re.fullmatch(r"(.+?)(?::(\d+))?", name) for name in names.split(",")]
    if path is None or not all(hosts):
        raise ValueError("must be redis+sentinel://HOST:PORT,HOST:PORT/SERVICE or .../SERVICE/DATABASE")
    user, _, password = credentials.partition(":")
    return (
        [(match[1], int(match[2] or 26379)) for match in hosts if match is not None],
        unquote(path[1]),
        int(path[2] or 0),
        unquote(user) or None,
        unquote(password) or None,
    )
