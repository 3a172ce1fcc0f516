from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphs.buckets import Bucket
from graphs.layout import MAX_BANNED_IDS, SCRATCH_PAGE, BatchInputs, BatchLayout, HostBatch, SlotInput

PAGE_SIZE = 4


def layout_of(num_tokens: int, num_slots: int, pages_per_slot: int = 8) -> BatchLayout:
    return BatchLayout(
        bucket=Bucket(num_tokens, num_slots), pages_per_slot=pages_per_slot, page_size=PAGE_SIZE
    )


def packed(layout: BatchLayout, *slots: SlotInput) -> BatchInputs:
    host = HostBatch(layout)
    host.pack(slots)
    return BatchInputs.of(layout, host.tensor)


@given(st.integers(1, 4096), st.integers(1, 64), st.integers(1, 512))
def test_buffer_holds_its_fields_exactly(num_tokens: int, num_slots: int, pages: int) -> None:
    layout = layout_of(num_tokens, num_slots, pages)
    end = 0
    for field in layout.fields.values():
        # Nothing between two fields but what brings the next one to 16 bytes.
        assert field.offset % 4 == 0
        assert end <= field.offset < end + 4
        end = field.end
    assert end <= layout.num_words < end + 4
    assert layout.size_bytes == 4 * layout.num_words
    assert HostBatch(layout).tensor.numel() == layout.num_words


def test_buffer_size_is_the_documented_formula() -> None:
    # 2 S -> 16, T -> 520, S + 1 -> 12, five times S -> 8, S P -> 8 * 9, S B -> 8 * 16
    assert layout_of(517, 8, pages_per_slot=9).num_words == 16 + 520 + 12 + 5 * 8 + 72 + 128


def test_every_field_is_read_as_it_was_written() -> None:
    inputs = packed(
        layout_of(8, 3),
        SlotInput(
            token_ids=(7, 8, 9),
            num_cached=5,
            page_ids=(3, 1),
            temperature=0.5,
            top_p=0.25,
            top_k=40,
            seed=2**62 + 1,
            output_index=6,
            banned_ids=(11, 12),
        ),
        SlotInput(token_ids=(4,), num_cached=0, page_ids=(2,), seed=1),
    )
    assert inputs.token_ids.tolist() == [7, 8, 9, 4, 0, 0, 0, 0]
    assert inputs.query_starts.tolist() == [0, 3, 4, 4]
    assert inputs.num_cached.tolist() == [5, 0, 0]
    assert inputs.page_table[:, :2].tolist() == [[3, 1], [2, 0], [0, 0]]
    assert inputs.temperature.tolist() == [0.5, 0.0, 0.0]
    assert inputs.top_p.tolist()[:2] == [0.25, 1.0]
    assert inputs.top_k.tolist() == [40, 0, 0]
    assert inputs.seed.tolist() == [2**62 + 1, 1, 0]
    assert inputs.output_index.tolist() == [6, 0, 0]
    assert inputs.banned_ids[0].tolist() == [11, 12] + [-1] * (MAX_BANNED_IDS - 2)
    assert set(inputs.banned_ids[1:].flatten().tolist()) == {-1}


@st.composite
def batches(draw: st.DrawFn) -> tuple[BatchLayout, list[SlotInput]]:
    """A batch of sequences of various lengths and cached prefixes, each with its own pages, and its bucket."""
    shapes = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=5))
    pages = iter(draw(st.permutations(range(1, 60))))
    slots = []
    for length, num_cached in shapes:
        num_pages = -(-(length + num_cached) // PAGE_SIZE)
        page_ids = [next(pages) for _ in range(num_pages)]
        slots.append(SlotInput(token_ids=range(100, 100 + length), num_cached=num_cached, page_ids=page_ids))
    num_tokens = sum(length for length, _ in shapes) + draw(st.integers(0, 10))
    return layout_of(num_tokens, len(shapes) + draw(st.integers(0, 3))), slots


@given(batches())
def test_derived_metadata_is_what_a_loop_over_the_sequences_gives(
    batch: tuple[BatchLayout, list[SlotInput]],
) -> None:
    layout, slots = batch
    derived = packed(layout, *slots).derive()
    start = 0
    for i, slot in enumerate(slots):
        length = len(slot.token_ids)
        for j in range(length):
            position = slot.num_cached + j
            page = slot.page_ids[position // PAGE_SIZE]
            assert derived.positions[start + j] == position
            assert derived.kv_slots[start + j] == page * PAGE_SIZE + position % PAGE_SIZE
        start += length
        assert derived.kv_lens[i] == slot.num_cached + length
        assert derived.last_token[i] == start - 1
    # Pad positions write to the scratch page, unused slots see nothing.
    assert (derived.kv_slots[start:] // PAGE_SIZE == SCRATCH_PAGE).all()
    assert (derived.positions[start:] == 0).all()
    assert (derived.kv_lens[len(slots) :] == 0).all()
    # No shape depends on the batch.
    assert derived.positions.shape == derived.kv_slots.shape == (layout.bucket.num_tokens,)
    assert derived.kv_lens.shape == derived.last_token.shape == (layout.bucket.num_slots,)


@given(batches())
def test_nothing_of_an_earlier_batch_stays_in_the_buffer(batch: tuple[BatchLayout, list[SlotInput]]) -> None:
    layout, slots = batch
    fresh, used = HostBatch(layout), HostBatch(layout)
    used.tensor.fill_(0x7FC00000)  # the bits of a float NaN
    fresh.pack(slots)
    used.pack(slots)
    assert torch.equal(fresh.tensor, used.tensor)


def test_tokens_that_are_there_as_words_are_packed_as_such() -> None:
    layout = layout_of(8, 3)
    first = SlotInput(token_ids=(7, 8, 9), num_cached=0, page_ids=(1,))
    second = SlotInput(token_ids=(2**31 - 1,), num_cached=5, page_ids=(2, 3))
    words = [
        replace(slot, words=struct.pack(f"{len(slot.token_ids)}i", *slot.token_ids))
        for slot in (first, second)
    ]
    plain = HostBatch(layout)
    plain.pack((first, second))
    for slots in (words, [words[0], second]):
        host = HostBatch(layout)
        host.pack(slots)
        assert torch.equal(host.tensor, plain.tensor)


def test_a_batch_that_does_not_fit_is_refused() -> None:
    host = HostBatch(layout_of(4, 1))
    slot = SlotInput(token_ids=(1, 2, 3), num_cached=0, page_ids=(1,))
    with pytest.raises(ValueError, match="bucket 4x1"):
        host.pack([slot, slot])
    with pytest.raises(ValueError, match="5 tokens"):
        host.pack([SlotInput(token_ids=range(5), num_cached=0, page_ids=(1, 2))])
