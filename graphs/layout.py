"""The static input of a graph: one int32 buffer that holds all metadata of a padded batch.

The host packs a batch into one (pinned) buffer and copies it in one go; everything else is derived on the
device inside the graph. `BatchLayout` is the formula for the size, `HostBatch` writes, `BatchInputs` reads.

With T token positions, S slots, P pages per slot and B banned tokens per slot, the buffer holds, in words of
4 bytes::

    seed           2 S      token_ids      T        query_starts   S + 1    num_cached     S
    page_table     S * P    temperature    S  (f32) top_p          S  (f32) top_k          S
    banned_ids     S * B    output_index   S

Each field begins at a multiple of 16 bytes, as kernels with wide loads want it. So, with a(n) the multiple of 4
that follows n, ``num_words = a(2 S) + a(T) + a(S + 1) + 5 a(S) + a(S P) + a(S B)``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch

from graphs.buckets import Bucket
from graphs.shaping import Field, ShapingInputs, SlotShaping, aligned, place_fields

SCRATCH_PAGE = 0
"""The page that pad positions write to and that nobody reads."""
MAX_BANNED_IDS = 16
"""Most token ids that may be banned for one sequence at one position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """Where each field of a padded batch lies in its buffer."""

    bucket: Bucket
    pages_per_slot: int
    page_size: int

    @property
    def fields(self) -> dict[str, Field]:
        """The fields by name, in the order in which they lie in the buffer."""
        tokens, slots = self.bucket.num_tokens, self.bucket.num_slots
        shapes = {
            "seed": (slots, 2),
            "token_ids": (tokens,),
            "query_starts": (slots + 1,),
            "num_cached": (slots,),
            "page_table": (slots, self.pages_per_slot),
            "temperature": (slots,),
            "top_p": (slots,),
            "top_k": (slots,),
            "banned_ids": (slots, MAX_BANNED_IDS),
            "output_index": (slots,),
        }
        return place_fields(shapes)

    @property
    def num_words(self) -> int:
        """Words of 4 bytes in the buffer."""
        tokens, slots = self.bucket.num_tokens, self.bucket.num_slots
        return (
            aligned(2 * slots)
            + aligned(tokens)
            + aligned(slots + 1)
            + 5 * aligned(slots)
            + aligned(slots * self.pages_per_slot)
            + aligned(slots * MAX_BANNED_IDS)
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of the buffer."""
        return 4 * self.num_words


@dataclass(slots=True, kw_only=True)  # not frozen: they are made in haste, and frozen ones take twice as long
class SlotInput:
    """One sequence of a batch: the tokens to compute now, and what it needs to attend and to sample."""

    token_ids: Sequence[int]
    num_cached: int
    """Tokens of the sequence whose KV is already in its pages."""
    page_ids: Sequence[int]
    """Its pages, in order; they hold `num_cached + len(token_ids)` tokens or more."""
    words: bytes | None = None
    """The same as `token_ids`, 32 bits each in this machine's order, if they are there like that."""
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    output_index: int = 0
    """How many tokens the request has produced: the place in its random stream."""
    banned_ids: Sequence[int] = ()
    """At most `MAX_BANNED_IDS` tokens that must not be chosen."""
    shaping: SlotShaping | None = None
    """Settings that few sequences have; they travel in a buffer of their own."""
    reported: bool = False
    """Whether the computation's report is wanted for it."""


class HostBatch:
    """A host buffer of one layout. `pack` fills it for a batch; every word of it is written each time."""

    def __init__(self, layout: BatchLayout, *, pinned: bool = False) -> None:
        self.layout = layout
        self.tensor = torch.zeros(layout.num_words, dtype=torch.int32, pin_memory=pinned)
        self._words = words = self.tensor.numpy()
        self._bytes = words.data.cast("B")
        fields = layout.fields
        self._byte_offsets = {name: 4 * field.offset for name, field in fields.items()}
        self._rows = {
            name: (range(4 * field.offset, 4 * field.end, 4 * field.shape[1]), field.shape[1])
            for name, field in fields.items()
            if len(field.shape) == 2
        }
        """Byte offsets of the rows of each field that has rows, and how many elements a row has."""
        banned = fields["banned_ids"]
        self._banned_ids = words[banned.offset : banned.end]

    def pack(self, slots: Sequence[SlotInput]) -> None:
        """Write a batch, padded: pad tokens belong to no sequence, unused slots are zero-length sequences.

        Raises `ValueError` if the batch does not fit the layout.
        """
        bucket = self.layout.bucket
        ends = list(accumulate([len(slot.token_ids) for slot in slots]))
        count, num_tokens = len(slots), ends[-1] if ends else 0
        if count > bucket.num_slots or num_tokens > bucket.num_tokens:
            raise ValueError(f"{count} sequences of {num_tokens} tokens do not fit bucket {bucket}")
        self._words.fill(0)
        self._banned_ids.fill(-1)
        words = [slot.words for slot in slots]
        if None in words:
            self._write("i", "token_ids", list(chain.from_iterable([slot.token_ids for slot in slots])))
        else:
            start = self._byte_offsets["token_ids"]
            self._bytes[start : start + 4 * num_tokens] = b"".join(words)  # type: ignore[arg-type]
        self._write("i", "query_starts", [0, *ends, *[num_tokens] * (bucket.num_slots - count)])
        num_cached = [slot.num_cached for slot in slots]
        if any(num_cached):
            self._write("i", "num_cached", num_cached)
        temperatures = [slot.temperature for slot in slots]
        if any(temperatures):
            # Greedy slots, whose temperature is 0, read nothing else of this.
            self._write("f", "temperature", temperatures)
            self._write("f", "top_p", [slot.top_p for slot in slots])
            self._write("i", "top_k", [slot.top_k for slot in slots])
            self._write("q", "seed", [slot.seed for slot in slots])
            self._write("i", "output_index", [slot.output_index for slot in slots])
        for row, slot in enumerate(slots):
            self._write_row("page_table", row, slot.page_ids)
            if slot.banned_ids:
                self._write_row("banned_ids", row, slot.banned_ids)

    def _write(self, kind: str, name: str, values: Sequence[float]) -> None:
        """Write the first elements of a field, of a type named as in `struct`."""
        # Of the ways to write a few Python numbers, or many, struct is the fastest by far.
        struct.pack_into(f"{len(values)}{kind}", self._bytes, self._byte_offsets[name], *values)

    def _write_row(self, name: str, row: int, values: Sequence[int]) -> None:
        """Write the first elements of a row of a field of integers."""
        offsets, size = self._rows[name]
        if len(values) > size:
            raise ValueError(f"{name} of a sequence must be at most {size} numbers, got {len(values)}")
        struct.pack_into(f"{len(values)}i", self._bytes, offsets[row], *values)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInputs:
    """A batch as the forward pass sees it. Views of one static buffer; the rest is derived from them.

    T token positions and S slots, padding included; all int32 unless said otherwise.
    """

    token_ids: torch.Tensor  # [T]
    query_starts: torch.Tensor  # [S + 1]
    num_cached: torch.Tensor  # [S]
    page_table: torch.Tensor  # [S, P]
    temperature: torch.Tensor  # [S] float32
    top_p: torch.Tensor  # [S] float32
    top_k: torch.Tensor  # [S]
    seed: torch.Tensor  # [S] int64
    output_index: torch.Tensor  # [S]
    banned_ids: torch.Tensor  # [S, B], -1 where there is none
    page_size: int
    shaping: ShapingInputs | None = None
    """Of meaning only in a batch of which a slot has a shaping."""

    @classmethod
    def of(
        cls, layout: BatchLayout, buffer: torch.Tensor, shaping: ShapingInputs | None = None
    ) -> BatchInputs:
        """Make the views of `buffer`, an int32 tensor of ``[layout.num_words]``."""
        views = {
            name: buffer[field.offset : field.end].view(field.shape) for name, field in layout.fields.items()
        }
        views["temperature"] = views["temperature"].view(torch.float32)
        views["top_p"] = views["top_p"].view(torch.float32)
        views["seed"] = views["seed"].view(torch.int64).view(-1)
        return cls(**views, page_size=layout.page_size, shaping=shaping)

    def derive(self) -> DerivedInputs:
        """Compute what follows from the packed fields. Runs inside the graph; no shape depends on a value."""
        num_tokens, num_slots = self.token_ids.shape[0], self.num_cached.shape[0]
        index = torch.arange(num_tokens, dtype=torch.int32, device=self.token_ids.device)
        ends = self.query_starts[1:]
        # The slot of each token, by counting the sequences before it; pad tokens lie behind every end.
        slot = (index.unsqueeze(1) >= ends).sum(dim=1)
        is_pad = slot >= num_slots
        slot = slot.clamp(max=num_slots - 1)
        positions = index - self.query_starts[slot] + self.num_cached[slot]
        positions = torch.where(is_pad, 0, positions)
        pages = self.page_table[slot, positions // self.page_size]
        kv_slots = pages * self.page_size + positions % self.page_size
        scratch = SCRATCH_PAGE * self.page_size + index % self.page_size
        query_lens = ends - self.query_starts[:-1]
        return DerivedInputs(
            positions=positions,
            kv_slots=torch.where(is_pad, scratch, kv_slots).long(),
            kv_lens=torch.where(query_lens > 0, self.num_cached + query_lens, 0),
            last_token=(ends - 1).clamp(min=0).long(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedInputs:
    """What the forward pass needs besides the packed fields."""

    positions: torch.Tensor  # [T] int32, place of each token in its sequence; 0 for pads
    kv_slots: (
        torch.Tensor
    )  # [T] int64, where its KV goes: page * page_size + offset; the scratch page for pads
    kv_lens: torch.Tensor  # [S] int32, tokens of each sequence after this pass; 0 for unused slots
    last_token: torch.Tensor  # [S] int64, index of each slot's last token in [T]
