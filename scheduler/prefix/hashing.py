"""Digests of blocks of tokens. Each covers the block and everything before it, so that equal digests mean equal KV.

A sequence's digests are a chain: the root covers the model and the `cache_salt` of the request, and each block's
digest the digest before it and the block's tokens. ApiServers compute those of prompts, so that the scheduler
only looks them up. They are SHA-256, which processors have instructions for.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import lru_cache

from scheduler.token_ids import TokenIds

BLOCK_TOKENS = 64
"""Tokens of a block. A multiple of the page size; smaller ones cost more to hash than they save."""
DIGEST_BYTES = 32


def prefix_of(token_ids: Sequence[int], *, model: str, cache_salt: str) -> bytes:
    """Return what `Request.prefix` holds for a prompt: the root and the digest of each complete block."""
    root = _root(model, cache_salt)
    return root + b"".join(chain_digests(root, token_ids, BLOCK_TOKENS))


def chain_digests(before: bytes, token_ids: Sequence[int], block_tokens: int) -> list[bytes]:
    """Return the digest of each complete block of the tokens that follow the block, or the root, of digest `before`."""
    data = token_ids.words if isinstance(token_ids, TokenIds) else _packer(len(token_ids)).pack(*token_ids)
    size, sha256, digest = 4 * block_tokens, hashlib.sha256, before
    return [
        digest := sha256(digest + data[end - size : end]).digest() for end in range(size, len(data) + 1, size)
    ]


class BlockChain:
    """Owns the digests of one sequence's complete blocks: those of its prompt, and of its output as that comes."""

    __slots__ = ("_block_tokens", "_root", "digests", "next_end")

    def __init__(self, prefix: bytes, block_tokens: int) -> None:
        """`prefix` is that of the request."""
        self._block_tokens = block_tokens
        self._root = prefix[:DIGEST_BYTES]
        self.digests: list[bytes] = list(
            _splitter(len(prefix) // DIGEST_BYTES - 1).unpack_from(prefix, DIGEST_BYTES)
        )
        """Of the blocks so far, in order."""
        self.next_end = 0
        """How many tokens the sequence has at the end of the block after those."""
        self._count()

    def num_blocks(self, num_tokens: int) -> int:
        """Return how many complete blocks of known digest so many tokens begin with."""
        return min(len(self.digests), num_tokens // self._block_tokens)

    def follow(self, prompt: Sequence[int], output: Sequence[int], num_tokens: int) -> None:
        """Have the digests of the blocks in the first `num_tokens` tokens of prompt and output."""
        start = len(self.digests) * self._block_tokens
        if num_tokens - start < self._block_tokens:
            return
        split = len(prompt)
        tokens = (*prompt[start:num_tokens], *output[max(start - split, 0) : max(num_tokens - split, 0)])
        before = self.digests[-1] if self.digests else self._root
        self.digests += chain_digests(before, tokens, self._block_tokens)
        self._count()

    def cut(self, num_tokens: int) -> None:
        """Forget the blocks that are not in the first `num_tokens` tokens."""
        del self.digests[num_tokens // self._block_tokens :]
        self._count()

    def _count(self) -> None:
        self.next_end = (len(self.digests) + 1) * self._block_tokens


@lru_cache(maxsize=1024)
def _root(model: str, cache_salt: str) -> bytes:
    # The length of the first says where the second begins.
    text = f"{len(model)}:{model}{cache_salt}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


@lru_cache(maxsize=128)
def _splitter(count: int) -> struct.Struct:
    return struct.Struct(f"{DIGEST_BYTES}s" * count)


@lru_cache(maxsize=1024)
def _packer(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}i")
