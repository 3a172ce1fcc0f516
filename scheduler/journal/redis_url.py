"""From the URL of a journal to a way to the Redis that it names."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from scheduler.errors import ConfigError
from scheduler.journal.client_pipe import ClientPipe
from scheduler.journal.pipe import Pipe
from scheduler.journal.resp import CONNECT_TIMEOUT_S, DirectPipe, RedisAddress
from scheduler.journal.settings import check_journal_url, sentinel_parts

_PLAIN = ("host", "port", "db", "username", "password", "connection_class")
"""What a URL says that asks for nothing special."""


def connect(url: str) -> Pipe:
    """Return a way to Redis. It connects when it is used first. Raises ConfigError if the URL has no known form."""
    # One more try after a broken connection, at once: it may only be that Redis was started again.
    options: dict[str, Any] = {
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": CONNECT_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 1),
    }
    try:
        check_journal_url(url)
        scheme = url.partition("://")[0]
        if scheme.endswith("cluster"):
            return ClientPipe(RedisCluster.from_url(url.replace("+cluster", "", 1), **options))
        if scheme.endswith("sentinel"):
            return ClientPipe(_from_sentinels(url, options))
        parts: dict[str, Any] = dict(parse_url(url))
        if not parts.keys() <= set(_PLAIN):
            return ClientPipe(Redis.from_url(url, **options))
    except ValueError as error:
        raise ConfigError(f"journal {error}") from None
    return DirectPipe(
        RedisAddress(
            host=parts.get("host", "localhost"),
            port=parts.get("port", 6379),
            db=parts.get("db", 0),
            username=parts.get("username"),
            password=parts.get("password"),
            tls=scheme == "rediss",
        )
    )


def _from_sentinels(url: str, options: dict[str, Any]) -> Redis:
    hosts, service, db, user, password = sentinel_parts(url)
    if url.startswith("rediss"):
        options = {**options, "ssl": True}
    # The sentinels are asked with the same credentials as the Redis that they watch.
    options = {**options, "username": user, "password": password}
    sentinel: Any = Sentinel(hosts, sentinel_kwargs=options)  # type: ignore[no-untyped-call]
    client: Redis = sentinel.master_for(service, db=db, **options)
    return client
