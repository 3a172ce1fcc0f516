from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from scheduler.errors import ConfigError
from scheduler.messages import Lease
from worker.kv_pool import KVLayerSpec, KVPool, KVSpec

SPEC = KVSpec(
    layers=(KVLayerSpec(num_kv_heads=2, head_dim=8), KVLayerSpec(num_kv_heads=1, head_dim=16)),
    dtype=torch.bfloat16,
)


def pools() -> list[KVPool]:
    shared, _ = KVPool.create(SPEC, name="decode-0", num_pages=6, page_size=4)
    return [shared, KVPool.on_device(SPEC, num_pages=6, page_size=4, device=torch.device("cpu"))]


def lease(epoch: int, *page_ids: int) -> Lease:
    return Lease(decode_worker="decode-0", epoch=epoch, page_ids=page_ids)


@pytest.mark.parametrize("pool", pools(), ids=["shared", "private"])
def test_layers_lie_one_after_the_other_and_do_not_overlap(pool: KVPool) -> None:
    parts = [part for layer in range(2) for part in pool.layer(layer)]
    assert [tuple(part.shape) for part in parts] == [(6, 4, 2, 8)] * 2 + [(6, 4, 1, 16)] * 2
    for number, part in enumerate(parts, start=1):
        part.fill_(number)
    offsets = [offset for layer in range(2) for offset in pool.offsets(layer)]
    for number, (offset, part) in enumerate(zip(offsets, parts, strict=True), start=1):
        assert (part == number).all()
        assert (pool.memory[offset : offset + part.numel()] == number).all()
    assert pool.memory.numel() == sum(part.numel() for part in parts)
    assert pool.memory.nbytes == 6 * 4 * SPEC.token_bytes


def test_what_one_process_writes_another_reads_under_the_same_epochs() -> None:
    owner, handle = KVPool.create(SPEC, name="decode-0", num_pages=6, page_size=4)
    other = KVPool.open(SPEC, handle)
    assert other.claim([lease(3, 1, 2)]) == {}
    other.layer(1)[0][2] = 7
    assert owner.check([lease(3, 1, 2)]) == {}
    assert (owner.layer(1)[0][2] == 7).all()


def test_a_pool_of_another_model_is_refused() -> None:
    _, handle = KVPool.create(SPEC, name="decode-0", num_pages=6, page_size=4)
    with pytest.raises(ConfigError, match="decode-0"):
        KVPool.open(KVSpec(layers=SPEC.layers, dtype=torch.float32), handle)


@pytest.mark.parametrize("pool", pools(), ids=["shared", "private"])
def test_stale_leases_are_refused_one_by_one(pool: KVPool) -> None:
    assert pool.claim([lease(5, 1, 2), lease(6, 3)]) == {}
    # The middle one is older than what its second page was claimed under.
    refused = pool.claim([lease(7, 4), lease(5, 5, 3), lease(8, 1)])
    assert list(refused) == [1]
    assert refused[1].label == "stale_lease"
    assert pool.check([lease(7, 4), lease(8, 1), lease(6, 3)]) == {}
    # Page 1 has a newer epoch now, page 5 was never claimed.
    assert list(pool.check([lease(7, 4), lease(5, 1, 2), lease(5, 5)])) == [1, 2]


def test_shared_pages_are_read_under_the_epoch_in_which_they_were_written() -> None:
    pool, _ = KVPool.create(SPEC, name="decode-0", num_pages=6, page_size=4)
    writer = Lease(decode_worker="decode-0", epoch=5, page_ids=(1, 2))
    reader = Lease(decode_worker="decode-0", epoch=7, page_ids=(1, 2, 3), shared_epochs=(5, 5))
    assert set(pool.claim([reader])) == {0}, "nobody has written them yet"
    assert not pool.claim([writer])
    assert not pool.claim([reader])
    assert not pool.check([writer, reader]), "the pages that are shared are still those of the first"
    assert not pool.claim([replace(writer, epoch=9, page_ids=(2,))])
    assert set(pool.check([reader])) == {0}
    again = replace(reader, epoch=10, page_ids=(1, 2, 4))
    assert set(pool.claim([again])) == {0}
    assert pool.check([replace(again, page_ids=(4,), shared_epochs=())]), (
        "nothing of a refused lease is claimed"
    )


def test_a_fence_refuses_older_leases_and_leaves_alone_how_many_sequences_run() -> None:
    pool, _ = KVPool.create(SPEC, name="decode-0", num_pages=6, page_size=4)
    pool.num_running = 3
    pool.fence(9)
    assert list(pool.claim([lease(8, 1), lease(10, 2)])) == [0]
    assert pool.num_running == 3
