"""KV pages: the memory that a decode worker owns and that prefill workers on the same host write into.

Every page carries the newest epoch under which it was written. Epochs only grow, so a late writer or reader
whose lease has ended and whose page was leased again is refused.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from scheduler.errors import ConfigError, StaleLeaseError
from scheduler.messages import PoolHandle


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
    """The pages of one decode worker, mapped into this process. Page 0 is the scratch page.

    The owner calls `create`; others call `open` with its handle. The memory has no name in the file system: it
    goes away with the last process that maps it, however that process ends.
    """

    def __init__(self, spec: KVSpec, memory: mmap.mmap, *, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._epochs = np.frombuffer(memory, dtype=np.int64, count=num_pages)
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        offset = 8 * num_pages
        for layer in spec.layers:
            shape = (num_pages, page_size, layer.num_kv_heads, layer.head_dim)
            count = num_pages * page_size * layer.num_kv_heads * layer.head_dim
            parts: list[torch.Tensor] = []
            for _ in ("keys", "values"):
                part = torch.frombuffer(memory, dtype=spec.dtype, count=count, offset=offset)
                parts.append(part.view(shape))
                offset += count * spec.dtype.itemsize
            self._layers.append((parts[0], parts[1]))

    @classmethod
    def create(cls, spec: KVSpec, *, name: str, num_pages: int, page_size: int) -> tuple[KVPool, PoolHandle]:
        """Allocate a pool of `num_pages` pages of `page_size` tokens.

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
        return cls(spec, memory, num_pages=num_pages, page_size=page_size), handle

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
        return cls(spec, memory, num_pages=handle.num_pages, page_size=handle.page_size)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of a layer, each ``[num_pages, page_size, kv_heads, head_dim]``."""
        return self._layers[index]

    def claim(self, page_ids: Sequence[int], epoch: int) -> None:
        """Mark pages as written under `epoch`. Raises `StaleLeaseError` if one has a newer epoch already."""
        pages = np.asarray(page_ids)
        newest = int(self._epochs[pages].max(initial=0))
        if newest > epoch:
            raise StaleLeaseError(f"pages are leased under epoch {newest}, refused epoch {epoch}")
        self._epochs[pages] = epoch

    def check(self, page_ids: Sequence[int], epoch: int) -> None:
        """Raise `StaleLeaseError` unless every page was last claimed under exactly `epoch`."""
        if not (self._epochs[np.asarray(page_ids)] == epoch).all():
            raise StaleLeaseError(f"pages are no longer, or not yet, under epoch {epoch}")
