"""Replay of a forward pass on static, padded buffers, one per bucket."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from graphs.buckets import Bucket, Ladder
from graphs.layout import BatchInputs, BatchLayout, HostBatch, SlotInput

Forward = Callable[[BatchInputs], torch.Tensor]


class GraphRunner:
    """Owns the static buffers of each bucket and runs `forward` on them.

    `forward` takes a padded batch and returns one row per slot. It is called with the same buffers for every
    batch of a bucket, so what a CUDA graph would have captured and what runs here are the same computation.
    """

    def __init__(self, forward: Forward, ladder: Ladder, *, pages_per_slot: int, page_size: int) -> None:
        self.ladder = ladder
        self._forward = forward
        self._host: dict[Bucket, HostBatch] = {}
        self._inputs: dict[Bucket, BatchInputs] = {}
        for bucket in ladder.buckets:
            layout = BatchLayout(bucket=bucket, pages_per_slot=pages_per_slot, page_size=page_size)
            self._host[bucket] = host = HostBatch(layout)
            # On the CPU the host buffer is the static input itself: nothing to copy.
            self._inputs[bucket] = BatchInputs.of(layout, host.tensor)

    @property
    def size_bytes(self) -> int:
        """Bytes of all static buffers."""
        return sum(host.layout.size_bytes for host in self._host.values())

    def warm_up(self) -> Mapping[Bucket, float]:
        """Run every bucket once on padding only, largest first; return the seconds of each."""
        seconds: dict[Bucket, float] = {}
        for bucket in self.ladder.buckets:
            started = time.perf_counter()
            self._host[bucket].pack(())
            self._forward(self._inputs[bucket])
            seconds[bucket] = time.perf_counter() - started
        return seconds

    def run(self, slots: Sequence[SlotInput]) -> tuple[torch.Tensor, Bucket]:
        """Run a batch in the smallest bucket that holds it.

        Returns the rows of its slots, in order, and the bucket. Raises `ValueError` if no bucket holds it.
        """
        bucket = self.ladder.fit(sum(len(slot.token_ids) for slot in slots), len(slots))
        self._host[bucket].pack(slots)
        return self._forward(self._inputs[bucket])[: len(slots)], bucket
