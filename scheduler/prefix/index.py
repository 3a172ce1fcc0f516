"""The blocks of tokens whose KV is complete in the pages of one decode worker. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class Block:
    """A block of tokens with its KV in pages, which nobody writes any more."""

    __slots__ = ("digest", "epochs", "num_users", "page_ids")

    def __init__(self, digest: bytes, page_ids: tuple[int, ...], epochs: tuple[int, ...]) -> None:
        self.digest = digest
        """Stands for its tokens and all before them; empty once the block was forgotten."""
        self.page_ids = page_ids
        self.epochs = epochs
        """Under which each of the pages was written."""
        self.num_users = 0
        """Leases that hold it."""


class Match(NamedTuple):
    """How much of a sequence is in the pages."""

    num_blocks: int
    """The first blocks of it."""
    num_used: int
    """Those of them that a lease holds: another that holds them takes no free pages."""


_NO_MATCH = Match(0, 0)


class Holders:
    """Owns which pools have a block, by its digest, so that none needs to be asked that has it not."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, tuple[str, ...]] = {}

    def of(self, digest: bytes) -> tuple[str, ...]:
        """Return the names of the pools that have a block."""
        return self._by_digest.get(digest, ())

    def add(self, digest: bytes, name: str) -> None:
        """A pool has a block from now on."""
        self._by_digest[digest] = (*self.of(digest), name)

    def remove(self, digest: bytes, name: str) -> None:
        """A pool has a block no more."""
        left = tuple(other for other in self._by_digest[digest] if other != name)
        if left:
            self._by_digest[digest] = left
        else:
            del self._by_digest[digest]


class PrefixIndex:
    """Owns the blocks: each is held by some leases, or by none and then may be evicted, least recently used first.

    All blocks have the same number of pages. Of a sequence's blocks the later ones are evicted first, as an earlier
    one is of use without them. Every operation is O(blocks touched).
    """

    def __init__(self, pages_per_block: int, holders: Holders, owner: str) -> None:
        """`holders` is told which blocks `owner` has here."""
        self.pages_per_block = pages_per_block
        self._holders = holders
        self._owner = owner
        self.num_evicted = 0
        """Blocks that were evicted so far."""
        self._blocks: dict[bytes, Block] = {}
        self._unused: OrderedDict[bytes, Block] = OrderedDict()
        """Those that no lease holds, the least recently used first."""

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def num_unused_pages(self) -> int:
        """Pages of the blocks that may be evicted."""
        return len(self._unused) * self.pages_per_block

    def count(self, digests: Sequence[bytes], most: int) -> int:
        """Return how many of a sequence's first blocks are here, `most` at most."""
        if not most or digests[0] not in self._blocks:
            return 0
        blocks = list(map(self._blocks.get, digests[:most]))
        return blocks.index(None) if None in blocks else len(blocks)

    def match(self, digests: Sequence[bytes], most: int) -> Match:
        """Return the same, and how many of them leases hold."""
        num_blocks = self.count(digests, most)
        if not num_blocks:
            return _NO_MATCH
        blocks = map(self._blocks.__getitem__, digests[:num_blocks])
        return Match(num_blocks, len([1 for block in blocks if block.num_users]))

    def hold(self, digests: Sequence[bytes], most: int) -> list[Block]:
        """Give those blocks to a lease, which drops them when it ends."""
        held: list[Block] = []
        for digest in digests[:most]:
            block = self._blocks.get(digest)
            if block is None:
                break
            if not block.num_users:
                del self._unused[digest]
            block.num_users += 1
            held.append(block)
        return held

    def add(self, digest: bytes, page_ids: tuple[int, ...], epochs: tuple[int, ...]) -> Block | None:
        """Take in a block that a lease has filled, and holds. Returns None if there is one of that digest."""
        if digest in self._blocks:
            return None
        block = self._blocks[digest] = Block(digest, page_ids, epochs)
        block.num_users = 1
        self._holders.add(digest, self._owner)
        return block

    def drop(self, block: Block) -> tuple[int, ...]:
        """A lease holds a block no more. Returns the pages that are free by that: none, unless it was forgotten."""
        block.num_users -= 1
        if block.num_users:
            return ()
        if not block.digest:
            return block.page_ids
        self._unused[block.digest] = block
        return ()

    def evict(self) -> tuple[int, ...]:
        """Forget the least recently used block of those that no lease holds, and return its pages."""
        digest, block = self._unused.popitem(last=False)
        del self._blocks[digest]
        self._holders.remove(digest, self._owner)
        self.num_evicted += 1
        return block.page_ids

    def forget(self, block: Block) -> None:
        """Have nobody find a block any more that a lease holds. Nothing happens if nobody does."""
        if block.digest:
            del self._blocks[block.digest]
            self._holders.remove(block.digest, self._owner)
            block.digest = b""

    def clear(self) -> list[int]:
        """Forget all blocks, and return the pages that are free by that: those that no lease holds."""
        freed = [page for block in self._unused.values() for page in block.page_ids]
        for block in self._blocks.values():
            self._holders.remove(block.digest, self._owner)
            block.digest = b""
        self._blocks.clear()
        self._unused.clear()
        return freed
