"""KV pages: the memory that a decode worker owns and that prefill workers on the same host write into.

Every page carries the newest epoch under which it was written. Epochs only grow, so a late writer or reader
whose lease has ended and whose page was leased again is refused.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path

import numpy as np
import torch

from scheduler.errors import ConfigError, StaleLeaseError
from scheduler.messages import Lease, PoolHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayerSpec:
    """KV shape of one attention layer, per token."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """KV shape of a whole model."""

    layers: tuple[KVLayerSpec, ...]
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes in all layers, keys and values together."""
        return sum(2 * spec.num_kv_heads * spec.head_dim * self.dtype.itemsize for spec in self.layers)

    def pool_bytes(self, num_pages: int, page_size: int) -> int:
        """Bytes of a pool: one epoch of 8 bytes per page, then keys and values layer by layer."""
        return num_pages * (8 + page_size * self.token_bytes)


class KVPool:
    """The pages of one decode worker, as this process sees them. Page 0 is the scratch page.

    Keys and values of all layers lie in one tensor, layer by layer; epochs lie in host memory.
    """

    def __init__(
        self, spec: KVSpec, epochs: np.ndarray, memory: torch.Tensor, *, num_pages: int, page_size: int
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.memory = memory
        """All keys and values, in one dimension."""
        # A batch has few pages: reading them one by one from a memoryview is faster than numpy's ways to read many.
        self._epochs = epochs.data
        self._epoch_of = self._epochs.__getitem__
        self._shapes = [(num_pages, page_size, layer.num_kv_heads, layer.head_dim) for layer in spec.layers]
        counts = [prod(shape) for shape in self._shapes]
        starts = [0, *accumulate(2 * count for count in counts)]
        self._offsets = [(start, start + count) for start, count in zip(starts, counts, strict=False)]

    @property
    def device(self) -> torch.device:
        """Where the pages lie."""
        return self.memory.device

    @classmethod
    def on_device(cls, spec: KVSpec, *, num_pages: int, page_size: int, device: torch.device) -> KVPool:
        """Allocate a pool for this process alone.

        Raises `ConfigError` if the memory is not there.
        """
        count = num_pages * page_size * spec.token_bytes // spec.dtype.itemsize
        try:
            memory = torch.zeros(count, dtype=spec.dtype, device=device)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"kv_memory: cannot get {count * spec.dtype.itemsize} bytes: {error}"
            ) from error
        epochs = np.zeros(num_pages, dtype=np.int64)
        return cls(spec, epochs, memory, num_pages=num_pages, page_size=page_size)

    @classmethod
    def _mapped(cls, spec: KVSpec, memory: mmap.mmap, *, num_pages: int, page_size: int) -> KVPool:
        epochs = np.frombuffer(memory, dtype=np.int64, count=num_pages)
        count = num_pages * page_size * spec.token_bytes // spec.dtype.itemsize
        elements = torch.frombuffer(memory, dtype=spec.dtype, count=count, offset=8 * num_pages)
        return cls(spec, epochs, elements, num_pages=num_pages, page_size=page_size)

    @classmethod
    def create(cls, spec: KVSpec, *, name: str, num_pages: int, page_size: int) -> tuple[KVPool, PoolHandle]:
        """Allocate a pool of `num_pages` pages of `page_size` tokens in memory that other processes can `open`.

        The memory has no name in the file system: it goes away with the last process that maps it, however that
        process ends.

        Raises `ConfigError` if the memory is not there: it is all taken now, never found missing later.
        """
        size_bytes = spec.pool_bytes(num_pages, page_size)
        fd = os.memfd_create(f"purefill-{name}")
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError as error:
            os.close(fd)
            raise ConfigError(
                f"kv_memory: cannot get {size_bytes} bytes of shared memory: {error}"
            ) from error
        memory = mmap.mmap(fd, size_bytes)
        handle = PoolHandle(
            decode_worker=name,
            transport="shm",
            # The descriptor stays open for the life of this process: it is the pool's address.
            address=f"/proc/{os.getpid()}/fd/{fd}",
            incarnation=os.getpid(),
            num_pages=num_pages,
            page_size=page_size,
            size_bytes=size_bytes,
        )
        return cls._mapped(spec, memory, num_pages=num_pages, page_size=page_size), handle

    @classmethod
    def open(cls, spec: KVSpec, handle: PoolHandle) -> KVPool:
        """Map another process's pool. Raises `ConfigError` if it does not fit this model."""
        size_bytes = spec.pool_bytes(handle.num_pages, handle.page_size)
        if size_bytes != handle.size_bytes:
            raise ConfigError(
                f"the KV pool of {handle.decode_worker} has {handle.size_bytes} bytes, this model needs "
                f"{size_bytes}: are model and dtype the same?"
            )
        with Path(handle.address).open("r+b") as file:
            memory = mmap.mmap(file.fileno(), size_bytes)
        return cls._mapped(spec, memory, num_pages=handle.num_pages, page_size=handle.page_size)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of a layer, each ``[num_pages, page_size, kv_heads, head_dim]``."""
        keys, values = self._offsets[index]
        shape = self._shapes[index]
        count = values - keys
        return self.memory[keys:values].view(shape), self.memory[values : values + count].view(shape)

    def offsets(self, index: int) -> tuple[int, int]:
        """Return the elements of `memory` at which the keys and the values of a layer begin."""
        return self._offsets[index]

    def claim(self, leases: Sequence[Lease]) -> dict[int, StaleLeaseError]:
        """Mark the pages of leases as written under their epochs.

        Returns the errors of the leases that are refused, by place: of those a page has a newer epoch already.
        """
        refused: dict[int, StaleLeaseError] = {}
        for i, lease in enumerate(leases):
            newest = max(map(self._epoch_of, lease.page_ids), default=0)
            if newest > lease.epoch:
                refused[i] = StaleLeaseError(
                    f"pages are leased under epoch {newest}, refused epoch {lease.epoch}"
                )
                continue
            for page in lease.page_ids:
                self._epochs[page] = lease.epoch
        return refused

    def check(self, leases: Sequence[Lease]) -> dict[int, StaleLeaseError]:
        """Return the errors of leases, by place, of which a page was not last claimed under exactly their epoch."""
        return {
            i: StaleLeaseError(f"pages are no longer, or not yet, under epoch {lease.epoch}")
            for i, lease in enumerate(leases)
            if any(self._epoch_of(page) != lease.epoch for page in lease.page_ids)
        }
