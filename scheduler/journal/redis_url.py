"""From the URL of a journal to a client of the Redis that it names."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote, urlsplit

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from scheduler.errors import ConfigError

CONNECT_TIMEOUT_S = 1.0
ANSWER_TIMEOUT_S = 1.0

JOURNAL_FORMS = (
    "memory, redis://HOST:PORT, redis+cluster://HOST:PORT or redis+sentinel://HOST:PORT,.../SERVICE"
)
_SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel")


def check_journal_url(url: str) -> None:
    """Raise ConfigError if this is not the URL of a Redis that a journal can be kept in."""
    scheme, separator, rest = url.partition("://")
    if scheme not in _SCHEMES or not separator or not rest:
        raise ConfigError(f"journal must be {JOURNAL_FORMS}; with rediss for TLS")
    if scheme.endswith("sentinel"):
        _sentinel_parts(url)


def connect(url: str) -> Redis | RedisCluster:
    """Return a client. It connects when it is used first. Raises ConfigError if the URL has no known form."""
    check_journal_url(url)
    scheme = url.partition("://")[0]
    # One more try after a broken connection, at once: it may only be that Redis was started again.
    options: dict[str, Any] = {
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": ANSWER_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 1),
    }
    try:
        if scheme.endswith("cluster"):
            return RedisCluster.from_url(url.replace("+cluster", "", 1), **options)
        if scheme.endswith("sentinel"):
            return _from_sentinels(url, options)
        return Redis.from_url(url, **options)
    except ValueError as error:
        raise ConfigError(f"journal must be {JOURNAL_FORMS}: {error}") from None


async def disconnect(client: Redis | RedisCluster) -> None:
    """Close all connections of a client."""
    await client.aclose()
    manager = getattr(getattr(client, "connection_pool", None), "sentinel_manager", None)
    for sentinel in manager.sentinels if manager is not None else ():
        await sentinel.aclose()


def host_of(url: str) -> str:
    """Return what a log may say of a journal's URL: everything but user, password and options."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"


def _from_sentinels(url: str, options: dict[str, Any]) -> Redis:
    hosts, service, db, user, password = _sentinel_parts(url)
    if url.startswith("rediss"):
        options = {**options, "ssl": True}
    # The sentinels are asked with the same credentials as the Redis that they watch.
    options = {**options, "username": user, "password": password}
    sentinel: Any = Sentinel(hosts, sentinel_kwargs=options)  # type: ignore[no-untyped-call]
    client: Redis = sentinel.master_for(service, db=db, **options)
    return client


def _sentinel_parts(url: str) -> tuple[list[tuple[str, int]], str, int, str | None, str | None]:
    """Return hosts, service, database, user and password. Raises ConfigError."""
    split = urlsplit(url)
    credentials, _, names = split.netloc.rpartition("@")
    path = re.fullmatch(r"/([^/]+)(?:/(\d+))?", split.path)
    hosts = [re.fullmatch(r"(.+?)(?::(\d+))?", name) for name in names.split(",")]
    if path is None or not all(hosts):
        raise ConfigError(
            "journal must be redis+sentinel://HOST:PORT,HOST:PORT/SERVICE or .../SERVICE/DATABASE"
        )
    user, _, password = credentials.partition(":")
    return (
        [(match[1], int(match[2] or 26379)) for match in hosts if match is not None],
        unquote(path[1]),
        int(path[2] or 0),
        unquote(user) or None,
        unquote(password) or None,
    )
