"""A prompt's tokens as numbers, and as the bytes that batches, hashes and messages are made of."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any


class TokenIds(tuple[int, ...]):
    """Token ids, also as 32-bit words, so that nobody who only hands them on must look at each of them.

    Pickled, they are the words alone. A part of them is an ordinary tuple.
    """

    words: bytes
    """The lowest byte first, as digests want it, and as most machines have it."""

    def __new__(cls, token_ids: Iterable[int]) -> TokenIds:
        """Raises `ValueError` for an id that is no signed number of 32 bits."""
        self = super().__new__(cls, token_ids)
        try:
            self.words = struct.pack(f"<{len(self)}i", *self)
        except struct.error as error:
            raise ValueError(f"token ids must be whole numbers of 32 bits: {error}") from error
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_words, (self.words,)


def _of_words(words: bytes) -> TokenIds:
    self = tuple.__new__(TokenIds, struct.unpack(f"<{len(words) // 4}i", words))
    self.words = words
    return self
