"""Which (tokens, slots) shapes are captured, and how a batch is cut and padded to them. Pure Python."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The shape of one captured graph: `num_tokens` token positions shared by at most `num_slots` sequences."""

    num_tokens: int
    num_slots: int

    def __str__(self) -> str:
        return f"{self.num_tokens}x{self.num_slots}"


def default_token_ladder(max_tokens: int, *, smallest: int = 16) -> tuple[int, ...]:
    """Return token buckets up to exactly `max_tokens`, each at most half as large again as the one before.

    Steps of 1, 1.5, 2, 3, 4, 6, ... times `smallest`, so that padding is a third of a bucket at most.
    """
    ladder: list[int] = []
    size = smallest
    while size < max_tokens:
        ladder.append(size)
        if size + size // 2 < max_tokens:
            ladder.append(size + size // 2)
        size *= 2
    return (*ladder, max_tokens)


class Ladder(Protocol):
    """The captured shapes, and which of them a batch is padded to."""

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets, largest first: the order in which they are captured."""

    def fit(self, num_tokens: int, num_sequences: int) -> Bucket:
        """Return the smallest bucket that holds a batch, or raise `ValueError` if none does."""

    def below(self, num_tokens: int) -> Ladder | None:
        """Return a ladder of the buckets of fewer tokens than `num_tokens`, or None if there is none."""


class StepLadder:
    """Buckets for decode steps, in which every sequence computes one token: n tokens in n slots."""

    def __init__(self, max_sequences: int) -> None:
        """Make buckets of 2, 4, 8, 12, 16, 24, ... sequences up to exactly `max_sequences`, >= 1.

        One sequence takes as long as two, and code compiled for any number would have to be compiled again for one.
        """
        small = [n for n in (2, 4) if n < max_sequences]
        self._sizes = (*small, *default_token_ladder(max_sequences, smallest=8))

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets, largest first."""
        return tuple(Bucket(size, size) for size in reversed(self._sizes))

    def fit(self, num_tokens: int, num_sequences: int) -> Bucket:
        """Return the smallest bucket of `num_sequences` sequences with one token each."""
        if num_tokens != num_sequences or num_sequences > self._sizes[-1]:
            raise ValueError(f"a step takes one token each of at most {self._sizes[-1]} sequences")
        size = self._sizes[bisect_left(self._sizes, num_sequences)]
        return Bucket(size, size)

    def below(self, num_tokens: int) -> None:
        """Return None: a decode worker has promised to run so many sequences."""


class BucketLadder:
    """Buckets for prefill: all pairs of a token bucket and a slot count."""

    def __init__(
        self, capture_tokens: Sequence[int], capture_slots: Sequence[int], *, may_shrink: bool = True
    ) -> None:
        """Make a ladder of all pairs of a token bucket and a slot count.

        `may_shrink` lets buckets leave it for which memory does not suffice.

        Raises `ValueError`, naming the list, if one is empty or holds a number below 1.
        """
        for name, sizes in (("capture_tokens", capture_tokens), ("capture_slots", capture_slots)):
            if not sizes or min(sizes) < 1:
                raise ValueError(f"{name} must be a non-empty list of numbers >= 1, got {list(sizes)}")
        self.capture_tokens = tuple(sorted(set(capture_tokens)))
        self.capture_slots = tuple(sorted(set(capture_slots)))
        self._may_shrink = may_shrink

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest bucket."""
        return self.capture_tokens[-1]

    @property
    def max_slots(self) -> int:
        """Sequences of the largest bucket."""
        return self.capture_slots[-1]

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets, largest first: the order in which they are captured."""
        return tuple(
            Bucket(t, s) for t in reversed(self.capture_tokens) for s in reversed(self.capture_slots)
        )

    def fit(self, num_tokens: int, num_sequences: int) -> Bucket:
        """Return the smallest bucket that holds `num_tokens` tokens of `num_sequences` sequences.

        Raises `ValueError` if none does; callers split a batch before they ask.
        """
        if num_tokens > self.max_tokens or num_sequences > self.max_slots:
            raise ValueError(
                f"a batch of {num_tokens} tokens and {num_sequences} sequences exceeds the largest bucket, "
                f"{self.max_tokens}x{self.max_slots}"
            )
        return Bucket(
            self.capture_tokens[bisect_left(self.capture_tokens, num_tokens)],
            self.capture_slots[bisect_left(self.capture_slots, num_sequences)],
        )

    def below(self, num_tokens: int) -> BucketLadder | None:
        """Return a ladder of the buckets of fewer tokens than `num_tokens`, or None if there is none to go on with."""
        if not self._may_shrink:
            return None
        kept = [tokens for tokens in self.capture_tokens if tokens < num_tokens]
        return BucketLadder(kept, self.capture_slots) if kept else None


class Segment(NamedTuple):
    """Tokens ``start:end`` of one item of a batch, computed in one pass."""

    item: int
    start: int
    end: int


def plan_passes(
    lengths: Sequence[int], *, max_tokens: int, max_slots: int, starts: Sequence[int] | None = None
) -> list[list[Segment]]:
    """Cut a batch into passes that each fit the largest bucket, in order.

    `starts`: for each item, how many of its first tokens need not be computed, if any need not.

    A prompt longer than `max_tokens` is cut into chunks; any other stays whole. A chunk attends to the earlier
    ones through their pages, so a prompt has at most one chunk in a pass.
    """
    if sum(lengths) <= max_tokens and len(lengths) <= max_slots:
        # Nearly always: one pass. (With `starts` there is less to compute than this counts.)
        begins = starts or [0] * len(lengths)
        whole = [
            Segment(i, start, end)
            for i, (start, end) in enumerate(zip(begins, lengths, strict=True))
            if start < end
        ]
        return [whole] if whole else []
    passes: list[list[Segment]] = []
    room = 0
    for item, length in enumerate(lengths):
        start = starts[item] if starts else 0
        while start < length:
            size = min(length - start, max_tokens)
            if size > room or len(passes[-1]) == max_slots:
                passes.append([])
                room = max_tokens
            passes[-1].append(Segment(item, start, start + size))
            room -= size
            start += size
    return passes
