"""Times vLLM's decode steps for `decode_step.py`; runs in an environment that has vLLM.

    python benchmarks/peer_vllm_decode.py --models qwen3-8b --sizes 64x1024 8x1024 --out vllm-decode.json

All requests are added, and computed until each of them decodes; then a time is that of one of the engine's steps, in
which every request produces one token. The engine runs in this process, without a server, with prefix caching off and
everything else as it comes. ``64x1024`` is 64 requests with contexts of 1,024 tokens in the middle of the measurement.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from peer_vllm import make_parser, measure_all

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
    """Measure decode steps."""
    parser = make_parser(__doc__, models=["qwen3-8b"], sizes=["64x1024", "8x1024", "1x1024"])
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()

    def measure_size(engine: Any, count: int, context: int, vocab_size: int) -> tuple[float, str]:
        return measure(engine, count, context, args.steps, vocab_size), ""

    measure_all(args, measure_size)


if __name__ == "__main__":
    main()
