"""Redis' general client may fail in more ways than it says: whoever waits is told."""

from __future__ import annotations

import asyncio
import socket

import pytest

from scheduler.journal.base import JournalError
from scheduler.journal.redis_url import connect


@pytest.mark.parametrize("scheme", ["redis+cluster", "redis+sentinel"])
def test_what_cannot_be_reached_is_said(scheme: str) -> None:
    async def scenario() -> None:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))  # and never listens
            url = f"{scheme}://127.0.0.1:{nobody.getsockname()[1]}" + "/primary" * scheme.endswith("sentinel")
            pipe = connect(url)
            try:
                for _ in range(2):
                    with pytest.raises(JournalError):
                        await pipe.calls([("PING",)])
            finally:
                await pipe.close()

    asyncio.run(asyncio.wait_for(scenario(), 10))
