"""Reading several asynchronous generators as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


def merge(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """Yield the items of all sources as they come, each source's in its order.

    Raises the first error of any source, after which no source is read any more.
    """
    return sources[0] if len(sources) == 1 else _merge(sources)


async def _merge(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    queue: asyncio.Queue[tuple[T] | Exception | None] = asyncio.Queue()

    async def read(source: AsyncGenerator[T]) -> None:
        try:
            async with aclosing(source):
                async for item in source:
                    queue.put_nowait((item,))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    readers = [asyncio.create_task(read(source)) for source in sources]
    try:
        num_open = len(sources)
        while num_open:
            entry = await queue.get()
            if entry is None:
                num_open -= 1
            elif isinstance(entry, Exception):
                raise entry
            else:
                yield entry[0]
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
