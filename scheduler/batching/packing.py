"""Which of the waiting requests leave together: in order, but filling a captured bucket where possible.

A batch is padded to a captured bucket, so its last few tokens are either free (they fill padding) or dear
(they open the next bucket). The packer takes requests in order up to the batch's limits, passing over those
that do not fit. If all that wait fit, that is the batch. If some are left behind, it compares a few other
batches: for some buckets, the one that fills the bucket in order, and the same with one request swapped for
one that fills it better. Let R be the tokens that wait, s the seconds that a batch of t tokens takes, and u
the seconds per token that full batches took of late. Everyone who waits sits through the batch; the fraction
(R - t) / R of them that it leaves behind then waits for half of the rest on average, which takes (R - t) u.
So it chooses the batch of least

    s + (R - t)² u / 2R

With a short queue that favours small batches, which answer their requests early; with a long one it favours
those with the most tokens per second, because what one batch wastes delays all the others.

Passing over is bounded. The first request in order always leaves, unless pages lack. One that was first
passed over some time ago, or whose deadline is nearer than that time, is bound: nothing behind it leaves
before it does, so that pages which come free are kept for it. And the packer looks at a bounded number of
requests, so its cost does not depend on how many wait.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from scheduler.batching.cost_model import CostModel
from scheduler.batching.fairness import Entry

_GOOD_FILL = 0.98
"""A batch that fills its bucket this far is left as it is."""
_MULTIPLES = (2, 4, 8, 16)
"""Batches of so many of the largest bucket are considered: only the last chunk of a batch is padded."""
_KEPT = 0.95
"""How much of the past the average u keeps at each full batch."""


class Limits(NamedTuple):
    """What a batch may hold."""

    max_requests: int
    max_pages: int
    max_tokens: int | None
    """None: no bound. If a single request has more, its batch may have as many as that one is padded to."""
    enough_tokens: int | None
    """So many tokens make a batch full, though it may get more if that pays. None: no number does."""
    may_resize: bool
    """Whether a batch that leaves some behind may have fewer requests than fit, or more tokens."""


class Packing(NamedTuple):
    """A batch that could leave now."""

    entries: list[Entry]
    """Its requests, in order."""
    passed: list[Entry]
    """The requests that it passes over, in order."""
    num_tokens: int
    is_full: bool
    """No more requests can join, or one that waits cannot."""
    is_saturated: bool
    """It is full because it has enough tokens."""


class _Choice(NamedTuple):
    chosen: list[int]
    """Which of the seen requests leave, ascending."""
    num_tokens: int
    num_pages: int
    is_saturated: bool


class Packer:
    """Chooses batches from requests in order. Keeps only how fast full batches were of late."""

    def __init__(self, cost_model: CostModel, *, num_ahead: int) -> None:
        """`num_ahead` bounds how many requests that cannot leave are looked at for one batch."""
        self._cost = cost_model
        self._num_ahead = num_ahead
        # Sums over full batches, the older the less: what they took, and what saturated ones would have.
        self._seconds = self._ideal_seconds = 0.0

    def pack(self, in_order: Iterator[Entry], limits: Limits, now: float, waiting_tokens: int) -> Packing:
        """Return the batch that would leave now, empty if no request has the pages that it needs."""
        most = limits.max_tokens if limits.enough_tokens is None else limits.enough_tokens
        seen: list[Entry] = []
        first = self._fill(in_order, seen, most, limits, now)
        is_full = (
            len(seen) > len(first.chosen) or first.is_saturated or len(first.chosen) == limits.max_requests
        )
        choice = first
        if is_full and first.chosen and first.num_tokens < _GOOD_FILL * self._cost.padded(first.num_tokens):
            choice = self._best(first, seen, in_order, limits, now, waiting_tokens)
        chosen = choice.chosen
        passed: list[Entry] = []
        if chosen and chosen[-1] >= len(chosen):
            leaving = set(chosen)
            passed = [seen[i] for i in range(chosen[-1]) if i not in leaving]
        return Packing(
            entries=[seen[i] for i in chosen],
            passed=passed,
            num_tokens=choice.num_tokens,
            is_full=is_full,
            is_saturated=first.is_saturated,
        )

    def dispatched(self, packing: Packing) -> None:
        """Learn how fast a batch that leaves is expected to be."""
        if packing.is_full:
            num_tokens = packing.num_tokens
            self._seconds = _KEPT * self._seconds + self._cost.seconds(num_tokens)
            ideal = num_tokens * self._cost.saturated_seconds_per_token
            self._ideal_seconds = _KEPT * self._ideal_seconds + ideal

    def _fill(
        self, in_order: Iterator[Entry], seen: list[Entry], most: int | None, limits: Limits, now: float
    ) -> _Choice:
        """Choose in order what fits into `most` tokens, adding all that was looked at to `seen`."""
        chosen: list[int] = []
        max_requests, max_pages = limits.max_requests, limits.max_pages
        num_tokens = num_pages = num_left = 0
        is_saturated = False
        for entry in in_order:
            seen.append(entry)
            if num_pages + entry.num_pages <= max_pages:
                if most is None or not chosen or num_tokens + entry.num_tokens <= most:
                    chosen.append(len(seen) - 1)
                    num_tokens += entry.num_tokens
                    num_pages += entry.num_pages
                    if most is not None and num_tokens >= most:
                        is_saturated = True
                        if num_tokens > most:
                            most = self._room_beside(num_tokens, limits)
                    if len(chosen) == max_requests:
                        break
                    continue
                is_saturated = True
            num_left += 1
            if num_left > self._num_ahead or (entry.bound_from <= now and entry.is_bound(now)):
                break
        return _Choice(chosen, num_tokens, num_pages, is_saturated)

    def _room_beside(self, num_tokens: int, limits: Limits) -> int:
        """Return the tokens of a batch whose first request alone has more than enough: others use its padding."""
        padded = self._cost.padded(num_tokens)
        if limits.max_tokens is None or num_tokens > limits.max_tokens:
            return padded
        return min(padded, limits.max_tokens)

    def _best(
        self,
        first: _Choice,
        seen: list[Entry],
        in_order: Iterator[Entry],
        limits: Limits,
        now: float,
        waiting_tokens: int,
    ) -> _Choice:
        """Compare what was chosen in order with other choices of requests that were seen, or come next."""
        num_seen = self._num_ahead + (limits.max_requests if limits.may_resize else len(first.chosen))
        seen += islice(in_order, max(num_seen - len(seen), 0))
        if len(seen) == len(first.chosen):
            return first
        options = [first, *self._options(first, seen, limits, now, waiting_tokens)]
        slowness = self._seconds / self._ideal_seconds if self._ideal_seconds else 1.0
        seconds_per_token = slowness * self._cost.saturated_seconds_per_token

        def delay(option: _Choice) -> float:
            left = waiting_tokens - option.num_tokens
            return self._cost.seconds(option.num_tokens) + left * left * seconds_per_token / (
                2 * waiting_tokens
            )

        return min(options, key=delay)

    def _options(
        self, first: _Choice, seen: list[Entry], limits: Limits, now: float, waiting_tokens: int
    ) -> Iterator[_Choice]:
        """Yield other choices that are worth a comparison."""
        cost = self._cost
        padded, smaller = cost.padded(first.num_tokens), cost.smaller_bucket(first.num_tokens)
        most = waiting_tokens if limits.max_tokens is None else max(limits.max_tokens, first.num_tokens)
        if len(first.chosen) == limits.max_requests or not limits.may_resize:
            yield from self._swapped(first, seen, (min(padded, most), smaller), limits, now)
            if limits.may_resize and smaller:
                yield self._fill(iter(seen), [], smaller, limits, now)
            return
        multiples = (times * cost.max_tokens for times in _MULTIPLES)
        targets = [smaller] if smaller else []
        targets += cost.buckets_from(first.num_tokens)
        targets += [target for target in multiples if padded < target < 2 * waiting_tokens]
        for target in targets:
            filled = self._fill(iter(seen), [], min(target, most), limits, now)
            yield filled
            yield from self._swapped(filled, seen, (min(target, most),), limits, now)

    @staticmethod
    def _swapped(
        choice: _Choice, seen: list[Entry], targets: tuple[int, ...], limits: Limits, now: float
    ) -> Iterator[_Choice]:
        """Yield, for each target, the choice with one request swapped that comes closest to it from below."""
        chosen = set(choice.chosen)
        others: list[tuple[int, int]] = []
        for i, entry in enumerate(seen):
            if i not in chosen:
                others.append((entry.num_tokens, i))
                if entry.bound_from <= now and entry.is_bound(now):
                    break
        others.sort()
        sizes = [size for size, _ in others]
        movable = [i for i in choice.chosen[1:] if seen[i].bound_from > now or not seen[i].is_bound(now)]
        for target in targets:
            room = target - choice.num_tokens
            best_change = -choice.num_tokens
            best: tuple[int, int] | None = None
            for out in movable:
                size = seen[out].num_tokens
                k = bisect_right(sizes, room + size) - 1
                if k >= 0 and sizes[k] - size > best_change:
                    into = others[k][1]
                    if choice.num_pages - seen[out].num_pages + seen[into].num_pages <= limits.max_pages:
                        best_change, best = sizes[k] - size, (out, into)
            if best is not None:
                out, into = best
                leaving = sorted(chosen - {out} | {into})
                num_pages = choice.num_pages - seen[out].num_pages + seen[into].num_pages
                yield _Choice(leaving, choice.num_tokens + best_change, num_pages, choice.is_saturated)
