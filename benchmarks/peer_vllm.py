"""Times vLLM's prefill of the same batches as `prefill_graphs.py`; runs in an environment that has vLLM.

    python benchmarks/peer_vllm.py --models qwen3-8b qwen3-0.6b --out vllm.json

A time is that of the engine's steps from the first to the last, the requests having been added before: token ids
are already in the engine, which favours vLLM a little. The engine runs in this process, without a server, with
prefix caching off and everything else as it comes. With --prefix-tokens 2048 it is on, and each prompt follows a prefix
of its own of so many tokens, which was computed before.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shapes import NAMES, write_shape


def make_engine(folder: Path, args: argparse.Namespace) -> Any:
    """Start vLLM on a model; random weights unless --folder names one."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    import vllm

    options: dict[str, Any] = {} if args.cpu else {"gpu_memory_utilization": 0.45}
    started = time.perf_counter()
    engine = vllm.LLM(
        model=str(folder),
        load_format="auto" if args.folder else "dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=args.max_model_len,
        enable_prefix_caching=args.prefix_tokens > 0,
        disable_log_stats=True,
        **options,
    ).llm_engine
    print(f"vLLM {vllm.__version__} is ready after {time.perf_counter() - started:.1f} s", flush=True)
    return engine


def measure(
    engine: Any, num_prompts: int, length: int, vocab_size: int, repeats: int, *, prefix_tokens: int = 0
) -> tuple[float, float]:
    """Return the median milliseconds from the first step to the last first token, by the clock and of this process."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
    numbers = random.Random(length)

    def tokens(count: int) -> list[int]:
        return [numbers.randrange(vocab_size) for _ in range(count)]

    prefixes = [tokens(prefix_tokens) for _ in range(num_prompts)]
    times, cpu_times = [], []
    # The first of the batches that do not count computes the prefixes.
    for repeat in range(repeats + 3):
        for i, prefix in enumerate(prefixes):
            prompt = {"prompt_token_ids": prefix + tokens(length)}
            engine.add_request(f"{num_prompts}x{length}-{repeat}-{i}", prompt, sampling)
        finished = 0
        before, cpu_before = time.perf_counter(), time.process_time()
        while finished < num_prompts:
            finished += sum(output.finished for output in engine.step())
        times.append(time.perf_counter() - before)
        cpu_times.append(time.process_time() - cpu_before)
    return statistics.median(times[3:]) * 1e3, statistics.median(cpu_times[3:]) * 1e3


def make_parser(
    description: str | None, *, models: Sequence[str], sizes: Sequence[str]
) -> argparse.ArgumentParser:
    """Return a parser of what every measurement of vLLM is told."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=NAMES, default=models)
    parser.add_argument("--folder", type=Path, help="a model on disk instead of --models")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.set_defaults(prefix_tokens=0)
    parser.add_argument("--sizes", nargs="+", default=sizes)
    parser.add_argument("--out", type=Path, required=True)
    return parser


def measure_all(
    args: argparse.Namespace, measure_size: Callable[[Any, int, int, int], tuple[float, str]]
) -> None:
    """Measure all sizes of all models, and write ``{model: {size: ms}}``.

    `measure_size` takes an engine, the two numbers of a size and the size of the vocabulary; it returns milliseconds
    and what else is to be said of them.
    """
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as work:
        for name in [args.folder.name] if args.folder else args.models:
            folder = args.folder or write_shape(name, Path(work))
            vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
            engine = make_engine(folder, args)
            figures[name] = {}
            for size in args.sizes:
                count, length = map(int, size.split("x"))
                figures[name][size], remark = measure_size(engine, count, length, vocab_size)
                print(f"{name} {size}: {figures[name][size]:.2f} ms{remark}", flush=True)
                args.out.write_text(json.dumps(figures, indent=1))


def main() -> None:
    """Measure prefill."""
    parser = make_parser(
        __doc__,
        models=["qwen3-8b", "qwen3-0.6b"],
        sizes=["8x16", "8x32", "8x64", "8x128", "8x256", "8x512", "8x1024"],
    )
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--prefix-tokens", type=int, default=0, help="cached tokens before each prompt")
    args = parser.parse_args()

    def measure_size(engine: Any, num_prompts: int, length: int, vocab_size: int) -> tuple[float, str]:
        ms, cpu_ms = measure(
            engine, num_prompts, length, vocab_size, args.repeats, prefix_tokens=args.prefix_tokens
        )
        return ms, f" ({cpu_ms:.2f} of the CPU)"

    measure_all(args, measure_size)


if __name__ == "__main__":
    main()
