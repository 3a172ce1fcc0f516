"""The prefix cache of one decode worker: the blocks in its pages, and which lease holds which of them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scheduler.prefix.index import Block, Holders, Match, PrefixIndex


@dataclass(slots=True)
class _Content:
    """What is known of the content of a lease's pages."""

    blocks: list[Block | None]
    """Of its first complete blocks. None: there was one of that digest already, in pages of another."""
    epochs: list[int]
    """Under which each of its pages is written."""


class PrefixCache:
    """Owns the index of blocks, and what each lease has to do with it.

    A page belongs to one lease, or to a block that leases share, or is free. Whoever ends a lease frees the pages
    that `end` returns, and takes those of `evict` when there are too few.
    """

    def __init__(self, pages_per_block: int, holders: Holders, owner: str) -> None:
        """`holders` is told which blocks `owner`, whose pages these are, has."""
        self._index = PrefixIndex(pages_per_block, holders, owner)
        self.pages_per_block = pages_per_block
        self._contents: dict[int, _Content] = {}
        """By the epoch of the lease."""

    def __len__(self) -> int:
        return len(self._index)

    @property
    def num_unused_pages(self) -> int:
        """Pages of blocks that no lease holds: free for others, which evicts the blocks."""
        return self._index.num_unused_pages

    @property
    def num_pages(self) -> int:
        """Pages of all blocks."""
        return len(self._index) * self.pages_per_block

    @property
    def num_evicted_pages(self) -> int:
        """Pages that were taken from blocks so far."""
        return self._index.num_evicted * self.pages_per_block

    def count(self, digests: Sequence[bytes], most: int) -> int:
        """Return how many of a sequence's first blocks are here, `most` at most."""
        return self._index.count(digests, most)

    def match(self, digests: Sequence[bytes], most: int) -> Match:
        """Return the same, and how many of them leases hold."""
        return self._index.match(digests, most)

    def hold(self, digests: Sequence[bytes], most: int) -> list[Block]:
        """Keep those blocks from being evicted. Their lease is to `begin` now."""
        return self._index.hold(digests, most)

    def evict(self) -> tuple[int, ...]:
        """Return the pages of the block that was unused for longest, which is forgotten."""
        return self._index.evict()

    def begin(self, epoch: int, blocks: Sequence[Block], num_own_pages: int) -> None:
        """A lease begins with the pages of blocks that were held for it, and some of its own."""
        epochs = [written for block in blocks for written in block.epochs]
        self._contents[epoch] = _Content([*blocks], epochs + [epoch] * num_own_pages)

    def grow(self, epoch: int, grant_epoch: int, num_pages: int) -> None:
        """A lease gets more pages, under an epoch of their own. Nothing happens if its content is not known."""
        content = self._contents.get(epoch)
        if content is not None:
            content.epochs += [grant_epoch] * num_pages

    def complete(self, epoch: int, page_ids: Sequence[int], digests: Sequence[bytes]) -> None:
        """The first pages of a lease, `page_ids` in all, hold the KV of the blocks of these digests completely.

        Nothing happens if its content is not known.
        """
        content, size = self._contents.get(epoch), self.pages_per_block
        if content is None:
            return
        for i in range(len(content.blocks), len(digests)):
            pages = slice(size * i, size * (i + 1))
            added = self._index.add(digests[i], tuple(page_ids[pages]), tuple(content.epochs[pages]))
            content.blocks.append(added)

    def end(self, epoch: int, page_ids: list[int]) -> list[int]:
        """A lease ends: return those of its pages that are free now. The others belong to blocks."""
        content = self._contents.pop(epoch, None)
        if content is None or not content.blocks:
            return page_ids
        size, blocks = self.pages_per_block, content.blocks
        freed = page_ids[size * len(blocks) :]
        # The last block first, so that it is evicted before those without which it is of no use.
        for i in range(len(blocks) - 1, -1, -1):
            block = blocks[i]
            freed += page_ids[size * i : size * (i + 1)] if block is None else self._index.drop(block)
        return freed

    def forget(self, epoch: int) -> None:
        """Have nobody find the blocks any more that a lease holds: its pages do not hold what they should."""
        for content in self._known((epoch,)):
            for block in content.blocks:
                if block is not None:
                    self._index.forget(block)

    def num_pages_back(self, num_pages: Mapping[int, int]) -> int:
        """Return how many pages are free once some leases have ended: how many each has, by its epoch."""
        users: Counter[Block] = Counter()
        num_back = sum(num_pages.values())
        for content in self._known(num_pages):
            users.update(block for block in content.blocks if block is not None)
        # A block counts once, and only if nobody else holds it.
        kept = sum(count - (count == block.num_users) for block, count in users.items())
        return num_back - kept * self.pages_per_block

    def clear(self) -> list[int]:
        """Forget all blocks, and return the pages that are free by that. Leases keep what they hold."""
        return self._index.clear()

    def _known(self, epochs: Iterable[int]) -> Iterable[_Content]:
        return (content for epoch in epochs if (content := self._contents.get(epoch)) is not None)
