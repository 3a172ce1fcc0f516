"""Inter-token times while another process on the same GPU prefills at full rate into the same pages.

    python benchmarks/decode_beside_prefill.py --model qwen3-8b --size 64x1024 --batch 8x128

Two processes as in the service: this one decodes, the other has opened its pages by CUDA IPC and computes one batch
after the other, pausing as `purefill serve --decode-share` makes it. Weights are random. The last thing printed is the
table. About two minutes, most of it compiling.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from decode_step import WARM_UP, num_pages, profile, start_sequences, time_steps
from shapes import NAMES, write_shape

from graphs.buckets import BucketLadder
from scheduler.messages import Lease, PoolHandle, PrefillBatch, PrefillItem, Request, SamplingParams
from worker.decode import DecodeEngine
from worker.kv_pool import KVPool
from worker.model import ModelSource, load_model
from worker.pacing import Pacer
from worker.prefill import PrefillEngine
from worker.startup import CUDA_PAGE_SIZE

SHARES = (0.0, 0.5, 0.75, 0.9)


def prefill_pages(batch: str, page_size: int) -> int:
    """Return the pages of a batch such as ``8x128``."""
    count, length = map(int, batch.split("x"))
    return count * -(-length // page_size)


def prefill_process(pipe: Connection, source: ModelSource, handle: PoolHandle, batch_size: str) -> None:
    """Prefill from each share of time received until the next message; answer with the batches a second."""
    count, length = map(int, batch_size.split("x"))
    model = load_model(source)
    engine = PrefillEngine("prefill-0", model, BucketLadder([count * length], [count]))
    (report,) = engine.attach(handle)
    numbers = random.Random(0)
    # The last pages of the pool: no sequence that decodes has them.
    pages = iter(range(handle.num_pages - prefill_pages(batch_size, handle.page_size), handle.num_pages))
    items = []
    for i in range(count):
        prompt = tuple(numbers.randrange(model.info.vocab_size) for _ in range(length))
        request = Request(
            request_id=str(i),
            api_server="api-0",
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
        )
        own = tuple(next(pages) for _ in range(-(-length // handle.page_size)))
        items.append(
            PrefillItem(request=request, lease=Lease(decode_worker="decode-0", epoch=1, page_ids=own))
        )
    batch = PrefillBatch(batch_id=1, decode_worker="decode-0", items=tuple(items))
    pipe.send(report.batch_seconds)
    while (share := pipe.recv()) is not None:
        pacer, started, done = Pacer(share), time.monotonic(), 0
        while not pipe.poll():
            time.sleep(pacer.wait_s(time.monotonic(), is_decoding=engine.is_decoding))
            pacer.computed(engine.run(batch).seconds, time.monotonic())
            done += 1
        pipe.recv()
        pipe.send(done / (time.monotonic() - started))


def main() -> int:
    """Measure decode alone and beside each share; print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=NAMES, default="qwen3-8b")
    parser.add_argument("--layers", type=int, help="use only so many layers")
    parser.add_argument("--size", default="64x1024", help="sequences x context of the decode steps")
    parser.add_argument("--batch", default="8x128", help="prompts x tokens of the prefill batches")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--profile", action="store_true", help="say what the GPU spends a lone step on")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    page_size = CUDA_PAGE_SIZE
    with tempfile.TemporaryDirectory() as work:
        folder = write_shape(args.model, Path(work), num_layers=args.layers)
        source = ModelSource(
            name=args.model, folder=folder, load_format="dummy", device="cuda", max_model_len=8192
        )
        model = load_model(source)
        pool, handle = KVPool.create(
            model.kv_spec,
            name="decode-0",
            num_pages=num_pages(args.size, args.steps, page_size) + prefill_pages(args.batch, page_size),
            page_size=page_size,
            device=model.device,
        )
        context = multiprocessing.get_context("spawn")
        pipe, other_end = context.Pipe()
        other = context.Process(
            target=prefill_process, args=(other_end, source, handle, args.batch), daemon=True
        )
        other.start()
        engine = DecodeEngine(model, pool, max_num_seqs=int(args.size.split("x")[0]))
        engine.prepare()
        batch_ms = pipe.recv() * 1e3

    def measure() -> dict[str, float]:
        start_sequences(engine, pool, args.size, args.steps, model.info.vocab_size)
        gaps = sorted(time_steps(engine, args.steps))
        return {
            "p50_ms": statistics.median(gaps) * 1e3,
            "p99_ms": gaps[int(0.99 * len(gaps))] * 1e3,
            "mean_ms": statistics.mean(gaps) * 1e3,
        }

    rows: list[dict[str, object]] = [{"decode_share": "alone", "batches_per_s": 0.0, **measure()}]
    for share in SHARES:
        pipe.send(share)
        figures = measure()
        pipe.send(None)
        rows.append({"decode_share": share, "batches_per_s": pipe.recv(), **figures})
    if args.profile:
        start_sequences(engine, pool, args.size, WARM_UP, model.info.vocab_size)
        profile(engine, 5)
    pipe.send(None)
    other.join(20)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    print(f"\n{torch.cuda.get_device_name()}: {args.model}, decode {args.size}, prefill {args.batch}, ")
    print(f"a batch alone {batch_ms:.2f} ms: at most {1e3 / batch_ms:.1f} a second")
    print(f"{'decode_share':>12}{'p50 ms':>9}{'p99 ms':>9}{'mean ms':>9}{'batches/s':>11}")
    for row in rows:
        print(
            f"{row['decode_share']!s:>12}{row['p50_ms']:9.2f}{row['p99_ms']:9.2f}{row['mean_ms']:9.2f}"
            f"{row['batches_per_s']:11.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
