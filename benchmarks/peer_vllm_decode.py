"""Times vLLM's decode steps for `decode_step.py`; runs in an environment that has vLLM.

    python benchmarks/peer_vllm_decode.py --models qwen3-8b --sizes 64x1024 8x1024 --out vllm-decode.json

All requests are added, and computed until each of them decodes; then a time is that of one of the engine's steps, in
which every request produces one token. The engine runs in this process, without a server, with prefix caching off and
everything else as it comes. ``64x1024`` is 64 requests with contexts of 1,024 tokens in the middle of the measurement.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from peer_vllm import make_engine
from shapes import NAMES, write_shape

WARM_UP = 8


def measure(engine: Any, count: int, context: int, steps: int, vocab_size: int) -> float:
    """Return the median milliseconds of a step of `count` requests."""
    from vllm import SamplingParams

    numbers = random.Random(context)
    # Prompts are computed in several steps, while the first of them decode already.
    slack = 200
    length = max(context - steps // 2 - WARM_UP, 1)
    sampling = SamplingParams(
        max_tokens=steps + WARM_UP + slack, temperature=0.0, ignore_eos=True, detokenize=False
    )
    names = [f"{count}x{context}-{i}" for i in range(count)]
    for name in names:
        ids = [numbers.randrange(vocab_size) for _ in range(length)]
        engine.add_request(name, {"prompt_token_ids": ids}, sampling)
    begun: set[str] = set()
    while len(begun) < count:
        begun |= {output.request_id for output in engine.step()}
    times = []
    for _ in range(WARM_UP + steps):
        before = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - before)
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return statistics.median(times[WARM_UP:]) * 1e3


def main() -> None:
    """Measure and write ``{model: {size: ms}}``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=NAMES, default=["qwen3-8b"])
    parser.add_argument("--folder", type=Path, help="a model on disk instead of --models")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--sizes", nargs="+", default=["64x1024", "8x1024", "1x1024"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as work:
        for name in [args.folder.name] if args.folder else args.models:
            folder = args.folder or write_shape(name, Path(work))
            vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
            engine = make_engine(folder, args)
            figures[name] = {}
            for size in args.sizes:
                count, context = map(int, size.split("x"))
                figures[name][size] = measure(engine, count, context, args.steps, vocab_size)
                print(f"{name} {size}: {figures[name][size]:.2f} ms", flush=True)
            args.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
