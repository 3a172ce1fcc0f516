"""From the URL of a journal to a client of the Redis that it names."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from scheduler.errors import ConfigError
from scheduler.journal.settings import check_journal_url, sentinel_parts

CONNECT_TIMEOUT_S = 1.0
ANSWER_TIMEOUT_S = 1.0


def connect(url: str) -> Redis | RedisCluster:
    """Return a client. It connects when it is used first. Raises ConfigError if the URL has no known form."""
    scheme = url.partition("://")[0]
    # One more try after a broken connection, at once: it may only be that Redis was started again.
    options: dict[str, Any] = {
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": ANSWER_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 1),
    }
    try:
        check_journal_url(url)
        if scheme.endswith("cluster"):
            return RedisCluster.from_url(url.replace("+cluster", "", 1), **options)
        if scheme.endswith("sentinel"):
            return _from_sentinels(url, options)
        return Redis.from_url(url, **options)
    except ValueError as error:
        raise ConfigError(f"journal {error}") from None


async def disconnect(client: Redis | RedisCluster) -> None:
    """Close all connections of a client."""
    await client.aclose()
    manager = getattr(getattr(client, "connection_pool", None), "sentinel_manager", None)
    for sentinel in manager.sentinels if manager is not None else ():
        await sentinel.aclose()


def _from_sentinels(url: str, options: dict[str, Any]) -> Redis:
    hosts, service, db, user, password = sentinel_parts(url)
    if url.startswith("rediss"):
        options = {**options, "ssl": True}
    # The sentinels are asked with the same credentials as the Redis that they watch.
    options = {**options, "username": user, "password": password}
    sentinel: Any = Sentinel(hosts, sentinel_kwargs=options)  # type: ignore[no-untyped-call]
    client: Redis = sentinel.master_for(service, db=db, **options)
    return client
