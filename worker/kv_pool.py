"""KV pages: the memory that a decode worker owns and that prefill workers on the same host write into.

On the CPU all of it is shared memory. On a GPU the pages are device memory, opened elsewhere by CUDA IPC, and the
epochs are shared host memory.

Every page carries the newest epoch under which it was written. Epochs only grow, so a late writer or reader
whose lease has ended and whose page was leased again is refused.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
import torch

from scheduler.errors import ConfigError, StaleLeaseError
from scheduler.messages import Lease, PoolHandle
from worker import cuda_ipc

_CPU = torch.device("cpu")
_SCRATCH_PAGE = 0
_own_pools: WeakValueDictionary[str, KVPool] = WeakValueDictionary()
"""Pools that this process made, by address: it cannot open its own device memory."""


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
        self._epochs = epochs
        # A batch has few pages: reading them one by one from a memoryview is faster than numpy's ways to read many.
        self._epoch_view = epochs.data
        self._epoch_of = self._epoch_view.__getitem__
        # Between threads of this process; other processes write only into pages that nobody else has leased.
        self._lock = threading.Lock()
        self._shapes = [(num_pages, page_size, layer.num_kv_heads, layer.head_dim) for layer in spec.layers]
        counts = [prod(shape) for shape in self._shapes]
        starts = [0, *accumulate(2 * count for count in counts)]
        self._offsets = [(start, start + count) for start, count in zip(starts, counts, strict=False)]
        self._layers = [self._views(index) for index in range(len(counts))]
        self._rows = [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in self._layers]

    @property
    def device(self) -> torch.device:
        """Where the pages lie."""
        return self.memory.device

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, keys and values of all layers together."""
        return self.memory.numel() // self.num_pages * self.memory.itemsize

    @property
    def num_running(self) -> int:
        """How many sequences decode in these pages, as the owner last said; for all who have the pool open."""
        return int(self._epochs[_SCRATCH_PAGE])

    @num_running.setter
    def num_running(self, count: int) -> None:
        # Nobody leases the scratch page, so its epoch is free for this.
        self._epochs[_SCRATCH_PAGE] = count

    @classmethod
    def on_device(cls, spec: KVSpec, *, num_pages: int, page_size: int, device: torch.device) -> KVPool:
        """Allocate a pool for this process alone.

        Raises `ConfigError` if the memory is not there.
        """
        memory = _device_memory(spec, num_pages=num_pages, page_size=page_size, device=device)
        epochs = np.zeros(num_pages, dtype=np.int64)
        return cls(spec, epochs, memory, num_pages=num_pages, page_size=page_size)

    @classmethod
    def create(
        cls,
        spec: KVSpec,
        *,
        name: str,
        num_pages: int,
        page_size: int,
        device: torch.device = _CPU,
    ) -> tuple[KVPool, PoolHandle]:
        """Allocate a pool of `num_pages` pages of `page_size` tokens that other processes on this host can `open`.

        Host memory has no name in the file system: it goes away with the last process that maps it, however that
        process ends. Device memory goes away with this process.

        Raises `ConfigError` if the memory is not there: it is all taken now, never found missing later.
        """
        size_bytes = spec.pool_bytes(num_pages, page_size)
        on_gpu = device.type == "cuda"
        host_bytes = 8 * num_pages if on_gpu else size_bytes
        fd = os.memfd_create(f"purefill-{name}")
        try:
            os.posix_fallocate(fd, 0, host_bytes)
        except OSError as error:
            os.close(fd)
            raise ConfigError(
                f"kv_memory: cannot get {host_bytes} bytes of shared memory: {error}"
            ) from error
        shared = mmap.mmap(fd, host_bytes)
        epochs = np.frombuffer(shared, dtype=np.int64, count=num_pages)
        if on_gpu:
            memory = _device_memory(spec, num_pages=num_pages, page_size=page_size, device=device)
        else:
            memory = _host_memory(spec, shared, num_pages=num_pages, page_size=page_size)
        handle = PoolHandle(
            decode_worker=name,
            transport="cuda_ipc" if on_gpu else "shm",
            # The descriptor stays open for the life of this process: it is the pool's address.
            address=f"/proc/{os.getpid()}/fd/{fd}",
            device_memory=cuda_ipc.share(memory) if on_gpu else "",
            device_type=device.type,
            incarnation=time.time_ns(),
            num_pages=num_pages,
            page_size=page_size,
            size_bytes=size_bytes,
        )
        pool = cls(spec, epochs, memory, num_pages=num_pages, page_size=page_size)
        _own_pools[handle.address] = pool
        return pool, handle

    @classmethod
    def open(cls, spec: KVSpec, handle: PoolHandle, device: torch.device = _CPU) -> KVPool:
        """Map another process's pool, or return one of this process. `device` is the opening process's own.

        Raises `ConfigError` if the pool does not fit this model or cannot be reached from this device.
        """
        num_pages, page_size = handle.num_pages, handle.page_size
        size_bytes = spec.pool_bytes(num_pages, page_size)
        if size_bytes != handle.size_bytes:
            raise ConfigError(
                f"the KV pool of {handle.decode_worker} has {handle.size_bytes} bytes, this model needs "
                f"{size_bytes}: are model and dtype the same?"
            )
        on_gpu = handle.transport == "cuda_ipc"
        if on_gpu and handle.address in _own_pools:
            return _own_pools[handle.address]
        if on_gpu != (device.type == "cuda"):
            raise ConfigError(
                f"device must be the same for prefill and decode: {handle.decode_worker} has its pages by "
                f"{handle.transport}, and this worker is on {device.type}"
            )
        with Path(handle.address).open("r+b") as file:
            shared = mmap.mmap(file.fileno(), 8 * num_pages if on_gpu else size_bytes)
        epochs = np.frombuffer(shared, dtype=np.int64, count=num_pages)
        if on_gpu:
            try:
                memory = cuda_ipc.open_shared(handle.device_memory, spec.dtype, device)
            except RuntimeError as error:
                raise ConfigError(
                    f"the KV pool of {handle.decode_worker} cannot be opened on {device}: {error}"
                ) from error
            memory = memory[: _num_elements(spec, num_pages=num_pages, page_size=page_size)]
        else:
            memory = _host_memory(spec, shared, num_pages=num_pages, page_size=page_size)
        return cls(spec, epochs, memory, num_pages=num_pages, page_size=page_size)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of a layer, each ``[num_pages, page_size, kv_heads, head_dim]``."""
        return self._layers[index]

    def rows(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same as `layer`, each ``[num_pages * page_size, kv_heads, head_dim]``."""
        return self._rows[index]

    def _views(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._offsets[index]
        shape = self._shapes[index]
        count = values - keys
        return self.memory[keys:values].view(shape), self.memory[values : values + count].view(shape)

    def offsets(self, index: int) -> tuple[int, int]:
        """Return the elements of `memory` at which the keys and the values of a layer begin."""
        return self._offsets[index]

    def claim(self, leases: Sequence[Lease]) -> dict[int, StaleLeaseError]:
        """Mark the own pages of leases as written under their epochs.

        Returns the errors of the leases that are refused, by place: of those an own page has a newer epoch already, or
        a shared one was written since under another epoch than the one that the lease names.
        """
        refused: dict[int, StaleLeaseError] = {}
        with self._lock:
            for i, lease in enumerate(leases):
                own = lease.own_page_ids
                newest = max(map(self._epoch_of, own), default=0)
                if newest > lease.epoch:
                    refused[i] = StaleLeaseError(
                        f"pages are leased under epoch {newest}, refused epoch {lease.epoch}"
                    )
                    continue
                if not self._holds_shared(lease):
                    refused[i] = _shared_error(lease)
                    continue
                for page in own:
                    self._epoch_view[page] = lease.epoch
        return refused

    def fence(self, epoch: int) -> None:
        """Refuse all leases that are older than this epoch, in every process that has the pool."""
        own = self._epochs[_SCRATCH_PAGE + 1 :]  # What stands at the scratch page is `num_running`.
        with self._lock:
            np.maximum(own, epoch, out=own)

    def check(self, leases: Sequence[Lease], *, besides: Collection[int] = ()) -> dict[int, StaleLeaseError]:
        """Return the errors of leases, by place, of which an own page was not last claimed under exactly their epoch,
        or a shared one not under the epoch that the lease names for it. Those in places `besides` are passed over."""
        refused: dict[int, StaleLeaseError] = {}
        for i, lease in enumerate(leases):
            if i in besides:
                continue
            epochs = list(map(self._epoch_of, lease.own_page_ids))
            if epochs.count(lease.epoch) != len(epochs):
                refused[i] = StaleLeaseError(f"pages are no longer, or not yet, under epoch {lease.epoch}")
            elif not self._holds_shared(lease):
                refused[i] = _shared_error(lease)
        return refused

    def _holds_shared(self, lease: Lease) -> bool:
        """Whether the shared pages of a lease were last written under the epochs that it names."""
        epochs = lease.shared_epochs
        return not epochs or tuple(map(self._epoch_of, lease.page_ids[: len(epochs)])) == epochs

    def read_pages(self, page_ids: Sequence[int]) -> torch.Tensor:
        """Copy pages into one dimension: layer by layer, keys then values, page by page."""
        ids = torch.tensor(page_ids, dtype=torch.int64, device=self.device)
        content = torch.empty(
            len(page_ids) * self.memory.numel() // self.num_pages, dtype=self.memory.dtype, device=self.device
        )
        for part, place in self._parts(content, len(page_ids)):
            torch.index_select(part, 0, ids, out=place)
        return content

    def write_pages(self, page_ids: Sequence[int], epochs: Sequence[int], content: torch.Tensor) -> None:
        """Copy what `read_pages` gave of other pages into these, except where a page is not under its epoch.

        No other claim of this process falls in between.
        """
        pages = np.asarray(page_ids, dtype=np.int64)
        with self._lock:
            (rows,) = np.nonzero(self._epochs[pages] == np.asarray(epochs, dtype=np.int64))
            ids = torch.from_numpy(pages[rows]).to(self.device)
            for part, place in self._parts(content, len(pages)):
                part.index_copy_(0, ids, place if len(rows) == len(pages) else place[rows.tolist()])
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()

    def _parts(self, content: torch.Tensor, num_pages: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield keys and values of each layer, ``[num_pages, elements]``, and their place in pages' content."""
        start = 0
        for index in range(len(self._shapes)):
            for part in self.layer(index):
                pages = part.view(self.num_pages, -1)
                end = start + num_pages * pages.shape[1]
                yield pages, content[start:end].view(num_pages, -1)
                start = end


def _shared_error(lease: Lease) -> StaleLeaseError:
    return StaleLeaseError(f"cached pages have a newer owner, refused epoch {lease.epoch}")


def _num_elements(spec: KVSpec, *, num_pages: int, page_size: int) -> int:
    return num_pages * page_size * spec.token_bytes // spec.dtype.itemsize


def _host_memory(spec: KVSpec, shared: mmap.mmap, *, num_pages: int, page_size: int) -> torch.Tensor:
    """Return keys and values of a pool in host memory, in which they follow the epochs."""
    count = _num_elements(spec, num_pages=num_pages, page_size=page_size)
    return torch.frombuffer(shared, dtype=spec.dtype, count=count, offset=8 * num_pages)


def _device_memory(spec: KVSpec, *, num_pages: int, page_size: int, device: torch.device) -> torch.Tensor:
    """Allocate keys and values. Raises `ConfigError` if the memory is not there."""
    count = _num_elements(spec, num_pages=num_pages, page_size=page_size)
    try:
        return torch.zeros(count, dtype=spec.dtype, device=device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"kv_memory: cannot get {count * spec.dtype.itemsize} bytes: {error}") from error
