"""Handoff on one host where prefill or decode is a group of ranks, each of which has some of the KV heads.

Groups of one size: each prefill rank writes into the pool of its decode rank. Otherwise each prefill rank fills pages
of its own, and copies from them, after the batch, the heads that each decode rank has. Whether a lease may be written
is decided on rank 0, by the epochs of the decode group's rank 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from scheduler.errors import ConfigError
from scheduler.messages import Lease, PoolHandle
from worker.handoff.base import Arrival, Handoff, Writing
from worker.handoff.direct import DirectHandoff
from worker.handoff.sender import Staging
from worker.kv_pool import KVPool, KVSpec
from worker.parallel.link import CopyPages

if TYPE_CHECKING:
    from worker.parallel.group import ShardGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """A decode rank's pool that gets some of this rank's heads."""

    pool: KVPool
    heads: Sequence[tuple[slice, slice]]
    """Of each layer: which heads of this rank, and which of the pool they are."""


def open_shards(
    handle: PoolHandle,
    spec: KVSpec,
    *,
    transport: str,
    group: ShardGroup | None,
    device: torch.device,
    staging: Callable[[], Staging],
) -> Handoff:
    """Return the way from this process, a rank of `group` or alone, into the pools of a decode worker's ranks.

    `spec` is the KV of this process; `staging` gives pages of its own, if they are needed. Raises `ConfigError` if
    there is no such way.
    """
    if transport not in ("shm", "cuda_ipc"):
        raise ConfigError(
            f"handoff_transport must be auto, shm or cuda_ipc with tensor_parallel_size > 1, and all workers on one "
            f"host, got {transport}"
        )
    num_decode_ranks = 1 + len(handle.shards)
    rank, num_ranks = (0, 1) if group is None else (group.rank, group.size)
    pools = (handle, *handle.shards)
    if num_ranks == num_decode_ranks:
        return DirectHandoff(KVPool.open(spec, pools[rank], device), num_ranks=num_ranks)
    targets = []
    whole = tuple(replace(layer, num_kv_heads=layer.num_kv_heads * num_ranks) for layer in spec.layers)
    part = _cut(KVSpec(layers=whole, dtype=spec.dtype), num_decode_ranks, handle.decode_worker)
    for number, pool in enumerate(pools):
        heads = [
            _overlap(rank, own.num_kv_heads, number, theirs.num_kv_heads)
            for own, theirs in zip(spec.layers, part.layers, strict=True)
        ]
        if any(own.stop > own.start for own, _ in heads):
            targets.append(_Target(pool=KVPool.open(part, pool, device), heads=heads))
    epochs = KVPool.open(part, handle, device) if rank == 0 else None
    return ReslicedHandoff(handle.decode_worker, staging(), targets, epochs, group)


def _cut(whole: KVSpec, size: int, decode_worker: str) -> KVSpec:
    """Return what one of `size` ranks has. Raises `ConfigError` if heads do not divide."""
    for layer in whole.layers:
        if layer.num_kv_heads % size:
            raise ConfigError(
                f"decode_tensor_parallel_size must divide {layer.num_kv_heads} KV heads, {decode_worker} has {size}"
            )
    layers = tuple(replace(layer, num_kv_heads=layer.num_kv_heads // size) for layer in whole.layers)
    return KVSpec(layers=layers, dtype=whole.dtype)


def _overlap(rank: int, num_own: int, other_rank: int, num_theirs: int) -> tuple[slice, slice]:
    """Return which of this rank's heads the other has too, and where it has them; empty ones if none."""
    own_start, their_start = rank * num_own, other_rank * num_theirs
    start = max(own_start, their_start)
    end = max(start, min(own_start + num_own, their_start + num_theirs))
    return slice(start - own_start, end - own_start), slice(start - their_start, end - their_start)


class ReslicedHandoff:
    """Owns the way of one prefill rank to decode ranks that have other heads than it.

    Of a group, rank 0 has the whole interface, and has the others `copy` when it finishes a writing.
    """

    def __init__(
        self,
        decode_worker: str,
        staging: Staging,
        targets: Sequence[_Target],
        epochs: KVPool | None,
        group: ShardGroup | None,
    ) -> None:
        """`epochs` is the pool by which rank 0 claims and checks leases."""
        self._decode_worker = decode_worker
        self._staging = staging
        self._targets = targets
        self._epochs = epochs
        self._group = group
        self.pool = staging.pool
        self.transport = "shm" if self.pool.device.type == "cpu" else "cuda_ipc"
        self.max_pages = staging.num_pages

    def begin(self, leases: Sequence[Lease], num_tokens: Sequence[int]) -> Writing:
        """Claim the leases' pages, and take as many of our own. What is cached there is computed here again."""
        assert self._epochs is not None
        refused = self._epochs.claim(leases)
        page_ids = [
            () if i in refused else self._staging.take(-(-count // self.pool.page_size))
            for i, count in enumerate(num_tokens)
        ]
        return Writing(leases=leases, page_ids=page_ids, refused=refused)

    def finish(self, writing: Writing) -> Arrival:
        """Copy what was written, on all ranks."""
        assert self._epochs is not None
        started = time.perf_counter()
        errors = self._epochs.check(writing.leases, besides=writing.refused)
        source: list[int] = []
        target: list[int] = []
        own = writing.own_page_ids
        for i, lease in enumerate(writing.leases):
            if i not in writing.refused and i not in errors:
                source += own[i]
                target += lease.own_page_ids[: len(own[i])]
        if self._group is not None and self._group.leader is not None:
            self._group.leader.tell(
                CopyPages(decode_worker=self._decode_worker, source=tuple(source), target=tuple(target))
            )
        self.copy(source, target)
        self._staging.give_back([page for page_ids in writing.page_ids for page in page_ids])
        errors |= self._epochs.check(writing.leases, besides=writing.refused)
        num_ranks = 1 if self._group is None else self._group.size
        return Arrival(
            errors=errors,
            num_bytes=writing.num_arrived(errors) * self.pool.page_bytes * num_ranks,
            seconds=time.perf_counter() - started,
        )

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy pages of our own to pages of the decode ranks; on rank 0, wait until all ranks have done so."""
        own_pages = torch.tensor(source, dtype=torch.int64, device=self.pool.device)
        their_pages = torch.tensor(target, dtype=torch.int64, device=self.pool.device)
        for to in self._targets:
            for index, (own, theirs) in enumerate(to.heads):
                for mine, yours in zip(self.pool.layer(index), to.pool.layer(index), strict=True):
                    content = mine[:, :, own].index_select(0, own_pages)
                    yours[:, :, theirs].index_copy_(0, their_pages, content)
        done = torch.zeros(1, device=self.pool.device)
        if self._group is not None:
            self._group.all_reduce(done)
        if self._epochs is not None:
            done.item()  # waits for the device

    def close(self) -> None:
        """Nothing is open."""
