"""Where the tokens of one request come from, and what becomes of its sequences when nobody waits for them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from scheduler.api.engine import Engine, TokenStream


class Computation(Protocol):
    """The sequences of one request, by the numbers of their choices."""

    @property
    def stream(self) -> TokenStream:
        """Their tokens."""

    async def stop(self, choices: Sequence[int]) -> None:
        """The texts of these choices are complete: they need no more tokens."""

    async def close(self, unfinished: Sequence[int], go_on: Callable[[], Awaitable[None]] | None) -> bool:
        """Nobody waits for the tokens any more; these choices are not complete.

        Returns True if they are completed all the same: then `go_on`, which does that, is running. None: that was
        done, and came to nothing.
        """


class EngineComputation:
    """Sequences at the engine; those that nobody waits for are cancelled."""

    def __init__(self, engine: Engine, request_ids: Sequence[str], stream: TokenStream) -> None:
        self._engine = engine
        self._request_ids = request_ids
        self._stream = stream

    @property
    def stream(self) -> TokenStream:
        """Their tokens."""
        return self._stream

    async def stop(self, choices: Sequence[int]) -> None:
        """Cancel the sequences of these choices."""
        if choices:
            await self._engine.cancel([self._request_ids[choice] for choice in choices])

    async def close(self, unfinished: Sequence[int], go_on: Callable[[], Awaitable[None]] | None) -> bool:
        """Cancel what is not complete."""
        await self.stop(unfinished)
        return False
