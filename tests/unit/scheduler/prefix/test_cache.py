"""Random lives of one pool's ledger with its prefix cache, beside a model of it that looks at every page.

No page is leased or evicted while anybody holds it, none is lost, and what is found cached is what was written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.messages import Lease, SequenceRef
from scheduler.pages import PageLedger
from scheduler.prefix.hashing import DIGEST_BYTES, chain_digests
from scheduler.prefix.index import Holders
from tests.unit.scheduler.test_core_machine import PAGE_SIZE, decode_info

ROOT = b"-" * DIGEST_BYTES
NUM_PAGES = 12


class CacheMachine(RuleBasedStateMachine):
    """Leases begin, grow, complete blocks and end in any order, in pools of blocks of one page or of two."""

    @initialize(pages_per_block=st.integers(1, 2))
    def start(self, pages_per_block: int) -> None:
        self.block_tokens = PAGE_SIZE * pages_per_block
        self.holders = Holders()
        self.ledger = PageLedger(
            decode_info("decode-0"), count(1), block_tokens=self.block_tokens, holders=self.holders
        )
        self.leases: dict[SequenceRef, tuple[tuple[int, ...], list[int]]] = {}  # tokens, pages
        self.content: dict[int, tuple[int, ...]] = {}  # all tokens up to the end of the page
        self.epochs: dict[int, int] = {}
        self.used_at: dict[bytes, int] = {}
        self.num_leased = 0

    def digests(self, tokens: Sequence[int]) -> list[bytes]:
        return chain_digests(ROOT, tokens, self.block_tokens)

    def held(self) -> Counter[int]:
        return Counter(page for _, pages in self.leases.values() for page in pages)

    def take(self, pages: Sequence[int], epoch: int) -> None:
        held = self.held()
        for page in pages:
            assert 0 < page <= NUM_PAGES
            assert not held[page], "a page was given away that somebody holds"
            self.content.pop(page, None)
            self.epochs[page] = epoch

    @precondition(lambda self: self.ledger.free_sequences)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=30), more=st.integers(0, 1))
    def lease(self, tokens: list[int], more: int) -> None:
        tokens = tokens[: PAGE_SIZE * self.ledger.free_pages]
        num_pages = min(-(-len(tokens) // PAGE_SIZE) + more, self.ledger.free_pages)
        if not num_pages:
            return
        digests, most = self.digests(tokens), (len(tokens) - 1) // self.block_tokens
        match = self.ledger.cache.match(digests, most)
        held = self.held()
        assert all(self.holders.of(digest) == ("decode-0",) for digest in digests[: match.num_blocks])
        lease = self.ledger.lease(num_pages, digests, most)
        self.num_leased += 1
        self.check_shared(lease, tokens, match.num_blocks)
        used = [page for page in lease.page_ids[: len(lease.shared_epochs)] if held[page]]
        assert len(used) == match.num_used * self.ledger.cache.pages_per_block
        self.take(lease.own_page_ids, lease.epoch)
        ref = SequenceRef(request_id=f"r{self.num_leased}", epoch=lease.epoch)
        self.leases[ref] = (tuple(tokens), list(lease.page_ids))

    def check_shared(self, lease: Lease, tokens: Sequence[int], num_blocks: int) -> None:
        shared = lease.page_ids[: len(lease.shared_epochs)]
        assert len(shared) * PAGE_SIZE == num_blocks * self.block_tokens < max(len(tokens), 1)
        for i, (page, epoch) in enumerate(zip(shared, lease.shared_epochs, strict=True), start=1):
            assert self.content[page] == tuple(tokens[: i * PAGE_SIZE])
            assert self.epochs[page] == epoch

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 9))
    def complete(self, which: int) -> None:
        """The KV of all tokens of a lease is written."""
        ref = list(self.leases)[which % len(self.leases)]
        tokens, pages = self.leases[ref]
        for i in range(len(tokens) // PAGE_SIZE):
            content = tokens[: (i + 1) * PAGE_SIZE]
            assert self.content.setdefault(pages[i], content) == content
        self.ledger.complete(ref, self.digests(tokens))

    @precondition(lambda self: self.leases and self.ledger.free_pages)
    @rule(which=st.integers(0, 9), more=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def grow(self, which: int, more: list[int]) -> None:
        ref = list(self.leases)[which % len(self.leases)]
        tokens, pages = self.leases[ref]
        grant = self.ledger.grow(ref, 1)
        assert grant.first_page == len(pages)
        self.take(grant.page_ids, grant.epoch)
        room = (len(pages) + 1) * PAGE_SIZE - len(tokens)
        self.leases[ref] = ((*tokens, *more[:room]), [*pages, *grant.page_ids])

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 9), others=st.integers(0, 3))
    def release(self, which: int, others: int) -> None:
        """Some leases end; how many pages come back was known before."""
        refs = list(self.leases)
        leaving = {refs[(which + i) % len(refs)] for i in range(1 + others)}
        pages_of = {ref.epoch: len(self.leases[ref][1]) for ref in leaving}
        before, expected = self.ledger.free_pages, self.ledger.cache.num_pages_back(pages_of)
        for ref in leaving:
            self.ledger.release(ref)
            del self.leases[ref]
        assert self.ledger.free_pages == before + expected

    @rule(luck=st.integers(0, 4))
    def reset(self, luck: int) -> None:
        if luck:
            return
        num_blocks = len(self.ledger.cache)
        assert self.ledger.reset_cache() == num_blocks
        assert len(self.ledger.cache) == self.ledger.cache.num_unused_pages == 0

    @invariant()
    def every_page_is_held_or_free(self) -> None:
        if not hasattr(self, "ledger"):
            return
        held, cache = self.held(), self.ledger.cache
        assert self.ledger.free_pages == NUM_PAGES - len(held)
        assert self.ledger.num_leases == len(self.leases)
        assert cache.num_unused_pages <= min(cache.num_pages, self.ledger.free_pages)
        shared = [page for page, num in held.items() if num > 1]
        assert len(shared) <= cache.num_pages or not len(cache)

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for ref in list(self.leases):
            self.ledger.release(ref)
        assert self.ledger.free_pages == NUM_PAGES
        lease = self.ledger.lease(NUM_PAGES)
        assert sorted(lease.page_ids) == list(range(1, NUM_PAGES + 1)), "all pages are there, each once"
        assert len(self.ledger.cache) == 0


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)


def test_the_least_recently_used_goes_first_and_the_end_of_a_sequence_before_its_beginning() -> None:
    ledger = PageLedger(decode_info("decode-0"), count(1), block_tokens=PAGE_SIZE)
    chains = {name: chain_digests(ROOT, [i] * 4 * PAGE_SIZE, PAGE_SIZE) for i, name in enumerate("abc")}
    for name in ("a", "b", "c", "a"):
        lease = ledger.lease(4, chains[name], 4)
        ref = SequenceRef(request_id=name, epoch=lease.epoch)
        ledger.complete(ref, chains[name])
        ledger.release(ref)
    assert ledger.free_pages == ledger.cache.num_unused_pages == NUM_PAGES

    new = ledger.lease(2)
    for num_left in ([4, 2, 4], [4, 0, 4], [4, 0, 2], [4, 0, 0], [2, 0, 0]):
        assert [ledger.cache.match(chains[name], 4).num_blocks for name in "abc"] == num_left
        ledger.grow(SequenceRef(request_id="new", epoch=new.epoch), 2)
    assert ledger.cache.num_evicted_pages == NUM_PAGES


def test_nothing_is_cached_where_a_block_is_not_whole_pages() -> None:
    ledger = PageLedger(decode_info("decode-0"), count(1), block_tokens=PAGE_SIZE - 1)
    for _ in range(2):
        digests = [ROOT, ROOT]
        lease = ledger.lease(3, digests, 2)
        ref = SequenceRef(request_id="r", epoch=lease.epoch)
        assert lease.shared_epochs == ()
        ledger.grow(ref, 1)
        ledger.complete(ref, digests)
        ledger.release(ref)
    assert len(ledger.cache) == 0
    assert ledger.free_pages == NUM_PAGES
