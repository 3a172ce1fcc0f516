"""What it costs a prefill batch that its KV goes into pages of another process: next to pages of its own, in one run.

    python benchmarks/handoff.py --model qwen3-8b
    python benchmarks/handoff.py --model qwen3-0.6b --layers 2 --device cpu --sizes 8x16

A second process owns the pages as a decode worker does; this one opens them (CUDA IPC on a GPU, shared memory on a
CPU) and computes batches of random tokens into them, in turn with batches into pages of its own. What differs between
the two is checked first: the KV of a batch has the same bits in both. The last thing printed is the table; the last
column is the time of claiming the pages and looking again, which both have. Weights are random.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from prefill_graphs import POOL, WARM_UP, Bench, make_bench
from shapes import NAMES, write_shape

from scheduler.messages import PrefillBatch
from worker.kv_pool import KVPool, KVSpec
from worker.model import ModelSource

OTHER = "decode-1"


def own_pages(pipe: Connection, spec: KVSpec, num_pages: int, page_size: int, device: str) -> None:
    """Own pages until the other end is closed, as a decode worker does."""
    pool, handle = KVPool.create(
        spec, name=OTHER, num_pages=num_pages, page_size=page_size, device=torch.device(device)
    )
    pipe.send(handle)
    pipe.poll(None)
    del pool


def into(batch: PrefillBatch, decode_worker: str) -> PrefillBatch:
    """Return the batch with its KV for the pages of another decode worker."""
    items = tuple(
        replace(item, lease=replace(item.lease, decode_worker=decode_worker)) for item in batch.items
    )
    return replace(batch, decode_worker=decode_worker, items=items)


def seconds(bench: Bench, batch: PrefillBatch) -> tuple[float, float]:
    """Return the time of a batch, and of its handoff."""
    result = bench.engine.run(batch)
    errors = [outcome.error_message for outcome in result.outcomes if outcome.error_message]
    if errors or result.handoff is None:
        raise RuntimeError(f"the batch failed: {errors}")
    return result.seconds, result.handoff.seconds


def measure(bench: Bench, others: KVPool, size: str, repeats: int) -> dict[str, float]:
    """Check one batch, then time batches into either pool, in turn."""
    num_prompts, length = map(int, size.split("x"))
    times: dict[str, list[tuple[float, float]]] = {POOL: [], OTHER: []}
    for repeat in range(repeats + WARM_UP):
        batch = bench.batch(bench.random_prompts([length] * num_prompts, seed=repeat))
        for name, found in times.items():
            found.append(seconds(bench, into(batch, name)))
        if repeat == 0:
            pages = [page for item in batch.items for page in item.lease.page_ids]
            if not torch.equal(bench.pool.read_pages(pages), others.read_pages(pages)):
                raise RuntimeError(f"{size}: the pages of the other process differ")
    own, other = (
        [statistics.median(column) for column in zip(*found[WARM_UP:], strict=True)]
        for found in times.values()
    )
    return {"own_ms": own[0] * 1e3, "other_ms": other[0] * 1e3, "claim_us": other[1] * 1e6}


def main() -> int:
    """Start the other process, measure, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=NAMES, default="qwen3-8b")
    parser.add_argument("--layers", type=int, help="use only so many layers")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--sizes", nargs="+", default=["8x16", "8x128", "8x1024"], help="prompts x tokens")
    parser.add_argument("--repeats", type=int, default=50)
    args = parser.parse_args()
    counts = [tuple(map(int, size.split("x"))) for size in args.sizes]
    with tempfile.TemporaryDirectory() as work:
        source = ModelSource(
            name=args.model,
            folder=write_shape(args.model, Path(work), num_layers=args.layers),
            load_format="dummy",
            device=args.device,
            max_model_len=8192,
        )
        tokens = sorted({count * length for count, length in counts})
        bench = make_bench(source, capture_tokens=tokens, slots=[max(count for count, _ in counts)])
    context = multiprocessing.get_context("spawn")
    pipe, other_end = context.Pipe()
    pool = bench.pool
    other = context.Process(
        target=own_pages,
        args=(other_end, bench.model.kv_spec, pool.num_pages, pool.page_size, args.device),
        daemon=True,
    )
    other.start()
    handle = pipe.recv()
    others = KVPool.open(bench.model.kv_spec, handle, bench.model.device)
    bench.engine.attach_pool(OTHER, others)
    rows = [(size, measure(bench, others, size, args.repeats)) for size in args.sizes]
    pipe.close()
    other_end.close()
    other.terminate()
    print(f"\n{args.model} on {args.device}, pages of another process by {handle.transport}")
    print(f"{'prompts':>9}{'own ms':>10}{'other ms':>10}{'cost':>8}{'MiB':>8}{'claim us':>10}")
    for (count, length), (size, row) in zip(counts, rows, strict=True):
        mib = count * length * bench.model.kv_spec.token_bytes / 2**20
        cost = row["other_ms"] / row["own_ms"] - 1
        print(
            f"{size:>9}{row['own_ms']:10.3f}{row['other_ms']:10.3f}{cost:8.1%}{mib:8.1f}{row['claim_us']:10.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
