"""Prefill of pure batches: correctness of the graphs, then their time next to a GEMM floor and to other servers.

    python benchmarks/prefill_graphs.py --models qwen3-8b qwen3-0.6b --peer vllm.json --out purefill.json
    python benchmarks/prefill_graphs.py --device cpu --folder PATH_OF_SMOLLM2 --peer vllm-cpu.json

All weights are random unless --folder names a model. The times of vLLM come from `peer_vllm.py`, which runs in an
environment of its own and writes the JSON that --peer names. The last things printed are the table and what failed
or, with --time-limit-s, was left out. A second run shows how long a start takes with the compiled code in the cache.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import prefill_checks
import torch
from shapes import NAMES, write_shape

from graphs.buckets import BucketLadder, default_token_ladder
from graphs.capture import CapturedGraph
from scheduler.messages import Lease, PrefillBatch, PrefillItem, Request, SamplingParams
from scheduler.token_ids import TokenIds
from worker import startup
from worker.kv_pool import KVPool
from worker.model import Model, ModelSource, load_model
from worker.prefill import PrefillEngine

MAX_PROMPTS = prefill_checks.MAX_PROMPTS
WARM_UP = 4
"""Batches before the clock counts: each of a bucket's two graphs has run twice then."""
POOL = "decode-0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A model with its engine, and pages for the largest batch."""

    name: str
    source: ModelSource
    check_tokens: Sequence[int]
    """Token buckets of the graphs that are checked: smaller than what is timed, so that float32 keeps up."""
    num_slots: int
    model: Model
    pool: KVPool
    engine: PrefillEngine

    def batch(
        self, prompts: Sequence[Sequence[int]], *, temperature: float = 0.0, top_p: float = 1.0
    ) -> PrefillBatch:
        """Return a batch of these prompts, each with pages of its own."""
        pages = iter(range(1, self.pool.num_pages))
        sampling = SamplingParams(max_tokens=1, temperature=temperature, top_p=top_p, seed=1)
        items = []
        for i, prompt in enumerate(prompts):
            page_ids = tuple(next(pages) for _ in range(-(-len(prompt) // self.pool.page_size)))
            request = Request(
                request_id=str(i), api_server="api-0", prompt_token_ids=TokenIds(prompt), sampling=sampling
            )
            items.append(
                PrefillItem(request=request, lease=Lease(decode_worker=POOL, epoch=1, page_ids=page_ids))
            )
        return PrefillBatch(batch_id=1, decode_worker=POOL, items=tuple(items))

    def random_prompts(self, lengths: Sequence[int], seed: int) -> list[list[int]]:
        """Return prompts of these lengths."""
        numbers = random.Random(seed)
        vocab_size = self.model.info.vocab_size
        return [[numbers.randrange(vocab_size) for _ in range(length)] for length in lengths]


def model_source(name: str, folder: Path, args: argparse.Namespace) -> ModelSource:
    """Return where a model comes from: a shape with random weights, unless --folder names a model."""
    return ModelSource(
        name=name,
        folder=folder,
        dtype=args.dtype,
        load_format="auto" if args.folder else "dummy",
        device=args.device,
        max_model_len=args.max_model_len,
    )


def make_bench(
    source: ModelSource, *, capture_tokens: Sequence[int], slots: Sequence[int], check_tokens: int = 0
) -> Bench:
    """Load the model and capture its graphs, saying what each took.

    `check_tokens` is the largest bucket of the checks, if there are any.
    """
    started = time.perf_counter()
    model = load_model(source)
    loaded = time.perf_counter()
    page_size = startup.page_size(model)
    num_pages = 1 + MAX_PROMPTS - (-2 * max(capture_tokens) // page_size)
    pool = KVPool.on_device(model.kv_spec, num_pages=num_pages, page_size=page_size, device=model.device)
    engine = PrefillEngine("prefill-0", model, BucketLadder(capture_tokens, slots))
    reports = engine.attach_pool(POOL, pool)
    for report in reports:
        print(
            f"  {report.bucket!s:>9}: {report.prepare_seconds:6.2f} s, {report.size_bytes / 2**20:8.1f} MiB, "
            f"full batch {report.batch_seconds * 1e3:7.2f} ms"
        )
    print(
        f"{source.name}: loaded in {loaded - started:.1f} s, {len(reports)} buckets in "
        f"{time.perf_counter() - loaded:.1f} s, {engine.buffer_bytes / 2**20:.0f} MiB of graphs and buffers"
    )
    return Bench(
        name=source.name,
        source=source,
        check_tokens=sorted(tokens for tokens in capture_tokens if tokens <= check_tokens),
        num_slots=max(slots),
        model=model,
        pool=pool,
        engine=engine,
    )


def measure_batch(bench: Bench, num_prompts: int, length: int, repeats: int) -> dict[str, float]:
    """Return the median time of a batch from token ids to first tokens, and what of it the host is busy.

    Each time the prompts are new and made before the clock starts, so that the GPU rests as long between two batches
    as it does in `peer_vllm.py`: running without a pause it becomes slower. The host's part is what it does while the
    GPU does not work: up to the end of the launch, and from the end of the replay on.
    On the CPU, where nothing is launched, the processor's time counts, which other programs disturb least.
    """
    totals, hosts, launches, cpu_times = [], [], [], []
    for repeat in range(repeats + WARM_UP):
        batch = bench.batch(bench.random_prompts([length] * num_prompts, seed=repeat))
        with _timed_launches() as launch:
            cpu_started, started = time.process_time(), time.perf_counter()
            submitted = bench.engine.submit(batch)
            _synchronize(bench.pool.device)
            computed = time.perf_counter()
            submitted.result()
            ended, cpu_ended = time.perf_counter(), time.process_time()
        totals.append(ended - started)
        hosts.append(max(end for _, end in launch) - started + ended - computed if launch else 0.0)
        launches.append(sum(end - begin for begin, end in launch))
        cpu_times.append(cpu_ended - cpu_started)
    figures = {"ms": statistics.median(totals[WARM_UP:]) * 1e3}
    if bench.pool.device.type == "cpu":
        return {**figures, "cpu_ms": statistics.median(cpu_times[WARM_UP:]) * 1e3}
    return {
        **figures,
        "host_us": statistics.median(hosts[WARM_UP:]) * 1e6,
        "launch_us": statistics.median(launches[WARM_UP:]) * 1e6,
    }


@contextmanager
def _timed_launches() -> Iterator[list[tuple[float, float]]]:
    """Collect when each launch of a graph begins and ends."""
    times: list[tuple[float, float]] = []
    replay = CapturedGraph.replay

    def timed(graph: CapturedGraph) -> None:
        started = time.perf_counter()
        replay(graph)
        times.append((started, time.perf_counter()))

    CapturedGraph.replay = timed  # type: ignore[method-assign]
    try:
        yield times
    finally:
        CapturedGraph.replay = replay  # type: ignore[method-assign]


@torch.inference_mode()
def gemm_floor_ms(bench: Bench, num_tokens: int, num_prompts: int, repeats: int) -> float:
    """Return the time of the batch's matrix products alone: all layers' projections, and the LM head once a prompt.

    On a GPU they are one graph. Between two of them the GPU rests as between two batches.
    """
    device = bench.pool.device
    products = [
        (
            torch.randn(
                num_prompts if is_head else num_tokens,
                layer.in_features,
                dtype=bench.model.kv_spec.dtype,
                device=device,
            ),
            layer,
        )
        for layer, is_head in bench.model.linear_layers()
    ]

    def run() -> None:
        for inputs, layer in products:
            layer(inputs)

    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
    times = []
    for repeat in range(repeats + WARM_UP):
        bench.random_prompts([num_tokens], seed=repeat)
        started = time.perf_counter()
        run()
        _synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[WARM_UP:]) * 1e3


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_model(bench: Bench, size: str, repeats: int, peer: dict[str, float]) -> dict[str, object]:
    """Measure a size, written as prompts x tokens; print its figures."""
    num_prompts, length = map(int, size.split("x"))
    row: dict[str, object] = {
        "model": bench.name,
        "size": size,
        **measure_batch(bench, num_prompts, length, repeats),
        "floor_ms": gemm_floor_ms(bench, num_prompts * length, num_prompts, repeats),
    }
    if size in peer:
        row["peer_ms"] = peer[size]
    print(json.dumps(row), flush=True)
    return row


def print_table(rows: Sequence[dict[str, object]]) -> None:
    """Print the figures and their ratios."""
    print(
        f"\n{'model':<14}{'prompts':>9}{'ms':>9}{'floor':>9}{'/floor':>8}{'peer':>9}{'/peer':>8}"
        f"{'host us':>9}{'launch us':>11}{'cpu ms':>9}"
    )
    for row in rows:
        ms, floor, peer = float(str(row["ms"])), float(str(row["floor_ms"])), row.get("peer_ms")
        peer_text = f"{peer:9.2f}{ms / float(str(peer)):8.3f}" if peer else f"{'-':>9}{'-':>8}"
        others = "".join(
            f"{row[name]:{width}.0f}" if name in row else f"{'-':>{width}}"
            for name, width in (("host_us", 9), ("launch_us", 11), ("cpu_ms", 9))
        )
        print(f"{row['model']:<14}{row['size']:>9}{ms:9.2f}{floor:9.2f}{ms / floor:8.2f}{peer_text}{others}")


def parse_args() -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=NAMES, default=["qwen3-8b", "qwen3-0.6b"])
    parser.add_argument("--layers", type=int, help="use only so many layers of each shape")
    parser.add_argument("--folder", type=Path, help="a model on disk instead of --models")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument(
        "--sizes", nargs="+", default=["8x16", "8x32", "8x64", "8x128", "8x256", "8x512", "8x1024"]
    )
    parser.add_argument("--slots", nargs="+", type=int, default=[8])
    parser.add_argument(
        "--capture-tokens", nargs="+", type=int, help="token buckets; all up to 8192 if not given"
    )
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument(
        "--check", nargs="*", choices=list(prefill_checks.CHECKS), help="run only these checks"
    )
    parser.add_argument("--check-tokens", type=int, default=512, help="largest bucket of the checks")
    parser.add_argument("--peer", type=Path, help="JSON file: {model: {size: ms}}")
    parser.add_argument("--out", type=Path, help="JSON file for the figures, written after each of them")
    parser.add_argument(
        "--time-limit-s", type=float, default=float("inf"), help="begin no check and no size after this long"
    )
    return parser.parse_args()


def main() -> int:
    """Check, measure, print the table. Returns 1 if a check failed or if there was no time for something."""
    started = time.perf_counter()
    args = parse_args()
    peers = json.loads(args.peer.read_text()) if args.peer else {}
    rows: list[dict[str, object]] = []
    failures: list[str] = []

    def in_time(what: str) -> bool:
        late = time.perf_counter() - started > args.time_limit_s
        if late:
            failures.append(f"{what}: not run, for want of time")
        return not late

    with tempfile.TemporaryDirectory() as work:
        for name in [args.folder.name] if args.folder else args.models:
            if not in_time(name):
                continue
            folder = args.folder or write_shape(name, Path(work), num_layers=args.layers)
            ladder = args.capture_tokens or default_token_ladder(8192 if args.device == "cuda" else 1024)
            bench = make_bench(
                model_source(name, folder, args),
                capture_tokens=ladder,
                slots=args.slots,
                check_tokens=args.check_tokens,
            )
            for check in prefill_checks.CHECKS if args.check is None else args.check:
                if in_time(f"{name} {check}"):
                    failures += [f"{name}: {failure}" for failure in prefill_checks.CHECKS[check](bench)]
            for size in args.sizes:
                if in_time(f"{name} {size}"):
                    rows.append(time_model(bench, size, args.repeats, peers.get(name, {})))
                    if args.out:
                        args.out.write_text(json.dumps(rows, indent=1))
            del bench
            if args.device == "cuda":
                torch.cuda.empty_cache()
    print_table(rows)
    for failure in failures:
        print("FAILED", failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
