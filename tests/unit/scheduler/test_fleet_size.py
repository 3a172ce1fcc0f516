"""What the core asks of the fleet at each request must not cost more in a large fleet, and must follow its changes."""

from __future__ import annotations

from scheduler.decode_pools import DecodePools
from scheduler.messages import DecodeWorkerInfo, ModelInfo, PoolHandle
from scheduler.prefill_workers import PrefillWorkers

MODEL = ModelInfo(name="m", max_model_len=64, vocab_size=9, eos_token_ids=(), dtype="", num_parameters=1)


def pool(name: str, num_pages: int) -> DecodeWorkerInfo:
    handle = PoolHandle(
        decode_worker=name,
        transport="",
        address="",
        incarnation=0,
        num_pages=num_pages + 1,
        page_size=4,
        size_bytes=0,
    )
    return DecodeWorkerInfo(
        name=name, model=MODEL, pool=handle, max_num_seqs=3, device="", load_seconds=0, weights_bytes=0
    )


def test_the_most_tokens_follow_the_pools_that_take_sequences() -> None:
    pools = DecodePools()
    assert pools.max_total_tokens == 0
    pools.add(pool("decode-0", 5))
    pools.add(pool("decode-1", 9))
    assert pools.max_total_tokens == 36
    largest = pools.get("decode-1")
    assert largest is not None
    pools.drain(largest)
    assert pools.max_total_tokens == 20
    assert pools.remove_drained() == ["decode-1"]
    pools.expect_back("decode-0")
    pools.remove("decode-0")
    assert pools.max_total_tokens == 20
    pools.expect("decode-2")
    assert pools.max_total_tokens > 10**9
    pools.give_up("decode-2")
    assert pools.max_total_tokens == 20
    pools.give_up("decode-0")
    assert pools.max_total_tokens == 0


def test_a_pool_that_left_and_came_again_drains_no_more() -> None:
    pools = DecodePools()
    pools.add(pool("decode-0", 5))
    old = pools.get("decode-0")
    assert old is not None
    pools.drain(old)
    pools.add(pool("decode-0", 5))
    assert pools.remove_drained() == []
    assert pools.max_total_tokens == 20
    chosen = pools.choose()
    assert chosen is not None
    assert chosen.free_pages == 5


def test_open_prefill_workers_are_those_that_take_batches_now_or_later() -> None:
    workers = PrefillWorkers()
    for name in ("prefill-0", "prefill-1"):
        workers.add(name)
    workers.drain("prefill-0")
    workers.drain("prefill-0")
    assert workers.num_open == 1
    workers.expect("prefill-1")
    workers.remove_lost("prefill-1")
    assert workers.num_open == 1
    workers.give_up("prefill-1")
    assert workers.num_open == 0
    assert workers.remove_drained() == ["prefill-0"]
    workers.add("prefill-0")
    assert workers.num_open == 1
    assert workers.remove_drained() == []
