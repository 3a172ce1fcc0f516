"""A decode worker's pages in a process of their own, and a prefill worker that hands pages over once.

Run as ``handoff_peer.py decode TRANSPORT NUM_PAGES HOST`` it writes its `PoolHandle` and obeys the lines that it
reads, for ``shm_ranks`` with the pages of two ranks, which have a KV head each; as ``handoff_peer.py prefill`` it
reads a handle and writes what became of two leases. All lines are JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from scheduler.messages import Lease, PoolHandle
from worker.handoff.base import Handoff
from worker.handoff.direct import DirectHandoff
from worker.handoff.receiver import Receiver
from worker.handoff.sender import SendHandoff, Staging
from worker.handoff.sharded import open_shards
from worker.kv_pool import KVLayerSpec, KVPool, KVSpec

SPEC = KVSpec(layers=(KVLayerSpec(num_kv_heads=2, head_dim=64),) * 2, dtype=torch.float32)
PAGE_SIZE = 4
DECODE = "decode-0"


def lease(epoch: int, *page_ids: int) -> Lease:
    return Lease(decode_worker=DECODE, epoch=epoch, page_ids=page_ids)


def fill(pool: KVPool, page_ids: Any, value: float) -> None:
    """Write a value into whole pages."""
    for index in range(len(SPEC.layers)):
        for part in pool.layer(index):
            part[list(page_ids)] = value


def open_handoff(handle: PoolHandle, *, num_staging_pages: int = 64) -> Handoff:
    """Return the way to a pool by its transport; by NCCL from the first GPU."""
    if handle.transport == "shm" and not handle.shards:
        return DirectHandoff(KVPool.open(SPEC, handle))
    device = torch.device("cuda", 0) if handle.transport == "nccl" else torch.device("cpu")
    staging = Staging(
        KVPool.on_device(SPEC, num_pages=num_staging_pages + 1, page_size=PAGE_SIZE, device=device)
    )
    if handle.shards:
        return open_shards(handle, SPEC, transport="shm", group=None, device=device, staging=lambda: staging)
    return SendHandoff(handle.endpoint, staging)


def read_handle(text: str) -> PoolHandle:
    """Return what a decode worker's process has written."""
    values = json.loads(text)
    return PoolHandle(**{**values, "shards": tuple(PoolHandle(**shard) for shard in values["shards"])})


def decode(transport: str, num_pages: int, host: str) -> None:
    device = torch.device("cpu") if transport != "nccl" else torch.device("cuda", 1)
    num_ranks = 2 if transport == "shm_ranks" else 1
    made = [
        KVPool.create(spec, name=DECODE, num_pages=num_pages + 1, page_size=PAGE_SIZE, device=device)
        for spec in [rank_spec(num_ranks)] * num_ranks
    ]
    pool, handle = made[0]
    handle = replace(handle, shards=tuple(shard for _, shard in made[1:]))
    if transport in ("gloo", "nccl"):
        receiver = Receiver(pool, name=DECODE, host=host)
        handle = replace(handle, transport=transport, endpoint=receiver.endpoint)
    say(asdict(handle))
    for line in sys.stdin:
        say(obey([pool for pool, _ in made], **json.loads(line)))
    # Threads that wait in torch would be in the way of an orderly end.
    os._exit(0)


def rank_spec(num_ranks: int) -> KVSpec:
    """Return what one of so many ranks has."""
    layers = tuple(replace(layer, num_kv_heads=layer.num_kv_heads // num_ranks) for layer in SPEC.layers)
    return replace(SPEC, layers=layers)


def obey(ranks: Sequence[KVPool], what: str, pages: list[int], epoch: int = 0, value: float = 0.0) -> Any:
    if what == "own":  # as a newer lease does that writes its own content
        refused = ranks[0].claim([lease(epoch, *pages)])
        for pool in ranks:
            fill(pool, pages, value)
        return not refused
    if what == "check":
        return not ranks[0].check([lease(epoch, *pages)])
    content = torch.cat([pool.read_pages(pages) for pool in ranks])
    return [content.min().item(), content.max().item()]


def prefill() -> None:
    handoff = open_handoff(read_handle(sys.stdin.readline()))
    writing = handoff.begin([lease(5, 3, 1), lease(6, 2)], [2 * PAGE_SIZE, 1])
    for value, page_ids in zip((7.0, 8.0), writing.page_ids, strict=True):
        fill(handoff.pool, page_ids, value)
    arrival = handoff.finish(writing).result()
    say({"num_bytes": arrival.num_bytes, "errors": {i: str(error) for i, error in arrival.errors.items()}})
    os._exit(0)


def say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "decode":
        decode(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        prefill()
