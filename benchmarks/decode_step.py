"""A decode step: checked against float32, then timed next to the time that its bytes take, and to other servers.

    python benchmarks/decode_step.py --models qwen3-8b --sizes 64x1024 8x1024 --peer vllm-decode.json
    python benchmarks/decode_step.py --device cpu --folder PATH_OF_SMOLLM2 --sizes 8x64

Weights are random unless --folder names a model. A step is a call of `DecodeEngine.step`, from one step's tokens on
the host to the next's. ``64x1024`` is 64 sequences whose contexts are 1,024 tokens long in the middle of the
measurement. The floor is (weights + KV) / the rate of a large copy on the same device, bytes read and written. The
times of vLLM come from `peer_vllm_decode.py`, which runs in an environment of its own. The last thing printed is the
table. Takes about two minutes on a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from prefill_checks import relative_error
from prefill_graphs import model_source
from shapes import NAMES, write_shape

from graphs.buckets import StepLadder
from graphs.layout import BatchInputs, SlotInput
from graphs.programs import Computation
from graphs.runner import GraphRunner
from scheduler.messages import DecodeStart, Lease, Request, SamplingParams
from worker import startup
from worker.decode import DecodeEngine
from worker.kv_pool import KVPool
from worker.model import Model, ModelSource, load_model, load_reference

WARM_UP = 8
CHECK_SLOTS = 8
CHECK_TOKENS = 40


def num_pages(size: str, steps: int, page_size: int) -> int:
    """Return the pages that all sequences of a size need, the scratch page included."""
    count, context = map(int, size.split("x"))
    return 1 + count * -(-(context + steps + WARM_UP) // page_size)


@torch.inference_mode()
def check_logits(model: Model, pool: KVPool, source: ModelSource) -> list[str]:
    """Feed eight sequences token by token, one more joining every third step; compare the last logits with float32.

    They may err 1.5 times as much as the model's own eager code does in the model's type.
    """
    numbers = random.Random(0)
    vocab_size = model.info.vocab_size
    prompts = [
        [numbers.randrange(vocab_size) for _ in range(CHECK_TOKENS - 3 * i)] for i in range(CHECK_SLOTS)
    ]
    logits = torch.zeros(CHECK_SLOTS, vocab_size, dtype=model.kv_spec.dtype, device=pool.device)

    def forward(inputs: BatchInputs) -> torch.Tensor:
        compute = model.compiled_logits if pool.device.type == "cuda" else model.logits
        return compute(inputs, pool, is_step=True)

    def keep(rows: torch.Tensor, _: BatchInputs) -> torch.Tensor:
        logits[: rows.shape[0]].copy_(rows)
        return rows.argmax(dim=-1)

    per_slot = -(-CHECK_TOKENS // pool.page_size)
    runner = GraphRunner(
        Computation(forward=forward, finishes={"keep": keep}, choose_finish=lambda _: "keep"),
        StepLadder(CHECK_SLOTS),
        # As in the engine that is timed: another width would be compiled anew.
        pages_per_slot=-(-model.info.max_model_len // pool.page_size),
        page_size=pool.page_size,
        device=pool.device,
    )
    runner.prepare()
    for step in range(CHECK_TOKENS):
        # The longest came first, so those that have not begun stand last.
        slots = [
            SlotInput(
                token_ids=[prompt[step - 3 * i]],
                num_cached=step - 3 * i,
                page_ids=range(1 + i * per_slot, 1 + (i + 1) * per_slot),
            )
            for i, prompt in enumerate(prompts)
            if step >= 3 * i
        ]
        runner.submit(slots).result()
    exact = _own_logits(source, prompts, torch.float32)
    error = relative_error(logits.float(), exact)
    own_error = relative_error(_own_logits(source, prompts, model.kv_spec.dtype), exact)
    print(
        f"  logits of {CHECK_SLOTS} sequences: relative error to float32 {error:.2e}, the model's own {own_error:.2e}"
    )
    return [] if error <= max(1.5 * own_error, 1e-4) else [f"logits err by {error:.2e}"]


def _own_logits(source: ModelSource, prompts: Sequence[Sequence[int]], dtype: torch.dtype) -> torch.Tensor:
    """Return the logits after each prompt by transformers' own model, ``[prompts, V]`` float32."""
    own = load_reference(source, attention="sdpa").to(dtype)  # type: ignore[arg-type]
    rows = [
        own(input_ids=torch.tensor([p], device=own.device), use_cache=False, logits_to_keep=1).logits[0, -1]
        for p in prompts
    ]
    return torch.stack(rows).float()


def start_sequences(engine: DecodeEngine, pool: KVPool, size: str, steps: int, vocab_size: int) -> None:
    """Add the sequences of a size, as if prefill had filled their pages."""
    count, context = map(int, size.split("x"))
    cached = max(context - steps // 2 - WARM_UP, 1)
    per_sequence = (num_pages(size, steps, pool.page_size) - 1) // count
    pages = list(range(1, 1 + count * per_sequence))
    random.Random(0).shuffle(pages)
    sampling = SamplingParams(max_tokens=steps + WARM_UP + 1, temperature=0.0)
    for i in range(count):
        lease = Lease(
            decode_worker="decode-0",
            epoch=time.monotonic_ns(),
            page_ids=tuple(pages[i * per_sequence : (i + 1) * per_sequence]),
        )
        pool.claim([lease])
        request = Request(
            request_id=str(i), api_server="api-0", prompt_token_ids=(1,) * cached, sampling=sampling
        )
        engine.add(DecodeStart(request=request, lease=lease, first_token_id=(7 * i + 1) % vocab_size))


def time_steps(engine: DecodeEngine, steps: int) -> list[float]:
    """Return the seconds between steps' ends, until every sequence has ended."""
    ends = []
    while engine.has_work:
        engine.step()
        ends.append(time.perf_counter())
    gaps = [end - start for start, end in itertools.pairwise(ends)]
    return gaps[WARM_UP - 1 : WARM_UP - 1 + steps]


def copy_rate(device: torch.device) -> float:
    """Return bytes per second of a large copy, read and written, with the clocks up."""
    count = 4 << 30 if device.type == "cuda" else 256 << 20
    source = torch.ones(count // 2, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    times = []
    deadline = time.perf_counter() + 0.7
    while time.perf_counter() < deadline or len(times) < 5:
        started = time.perf_counter()
        target.copy_(source)
        _synchronize(device)
        times.append(time.perf_counter() - started)
    return 2 * count / statistics.median(times[len(times) // 2 :])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def profile(engine: DecodeEngine, num_steps: int) -> None:
    """Print what the device spends a step on."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    with torch_profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(num_steps):
            engine.step()
        torch.cuda.synchronize()
    events = sorted(trace.key_averages(), key=lambda event: -event.self_device_time_total)
    for event in events[:18]:
        mean = event.self_device_time_total / event.count
        total = event.self_device_time_total / num_steps
        print(f"  {total:8.0f} us a step {event.count / num_steps:6.1f} x {mean:7.2f} us  {event.key[:90]}")


def weights_read(model: Model) -> int:
    """Return the bytes of weights that a step reads: of all linear layers, the LM head among them."""
    counts = [layer.in_features * layer.out_features for layer, _ in model.linear_layers()]
    return sum(counts) * model.kv_spec.dtype.itemsize


def measure(
    name: str, folder: Path, args: argparse.Namespace, peer: dict[str, float]
) -> tuple[list[dict[str, object]], list[str]]:
    """Check and time one model."""
    device = torch.device(args.device)
    source = model_source(name, folder, args)
    model = load_model(source)
    page_size = startup.page_size(model)
    pages = max(num_pages(size, args.steps, page_size) for size in args.sizes)
    pool = KVPool.on_device(model.kv_spec, num_pages=pages, page_size=page_size, device=device)
    failures = [] if args.no_check else check_logits(model, pool, source)
    rate = copy_rate(device)
    torch.manual_seed(0)
    pool.memory.normal_()
    rows: list[dict[str, object]] = []
    for size in args.sizes:
        count, context = map(int, size.split("x"))
        started = time.perf_counter()
        engine = DecodeEngine(model, pool, max_num_seqs=count)
        engine.prepare()
        prepared = time.perf_counter() - started
        start_sequences(engine, pool, size, args.steps, model.info.vocab_size)
        gaps = sorted(time_steps(engine, args.steps))
        kv_bytes = count * context * model.kv_spec.token_bytes
        row: dict[str, object] = {
            "model": name,
            "size": size,
            "ms": statistics.median(gaps) * 1e3,
            "p99_ms": gaps[int(0.99 * (len(gaps) - 1))] * 1e3,
            "floor_ms": (weights_read(model) + kv_bytes) / rate * 1e3,
            "copy_tb_per_s": rate / 1e12,
            "prepare_s": prepared,
        }
        if size in peer:
            row["peer_ms"] = peer[size]
        rows.append(row)
        print(json.dumps(row), flush=True)
        if args.profile:
            start_sequences(engine, pool, size, args.steps, model.info.vocab_size)
            profile(engine, 5)
        del engine
    return rows, [f"{name}: {failure}" for failure in failures]


def print_table(rows: Sequence[dict[str, object]]) -> None:
    """Print the figures and their ratios."""
    print(f"\n{'model':<14}{'size':>10}{'ms':>9}{'p99':>9}{'floor':>9}{'/floor':>8}{'peer':>9}{'/peer':>8}")
    for row in rows:
        ms, floor, peer = float(str(row["ms"])), float(str(row["floor_ms"])), row.get("peer_ms")
        peer_text = f"{peer:9.2f}{ms / float(str(peer)):8.2f}" if peer else f"{'-':>9}{'-':>8}"
        print(
            f"{row['model']:<14}{row['size']:>10}{ms:9.2f}{row['p99_ms']:9.2f}{floor:9.2f}{ms / floor:8.2f}{peer_text}"
        )


def main() -> int:
    """Check, measure, print the table. Returns 1 if a check failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=NAMES, default=["qwen3-8b"])
    parser.add_argument("--layers", type=int, help="use only so many layers of each shape")
    parser.add_argument("--folder", type=Path, help="a model on disk instead of --models")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--sizes", nargs="+", default=["64x1024", "8x1024", "1x1024"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--profile", action="store_true", help="say what the GPU spends a step on")
    parser.add_argument("--peer", type=Path, help="JSON file: {model: {size: ms}}")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    peers = json.loads(args.peer.read_text()) if args.peer else {}
    rows: list[dict[str, object]] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as work:
        for name in [args.folder.name] if args.folder else args.models:
            folder = args.folder or write_shape(name, Path(work), num_layers=args.layers)
            measured, failed = measure(name, folder, args, peers.get(name, {}))
            rows += measured
            failures += failed
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    print_table(rows)
    for failure in failures:
        print("FAILED", failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
