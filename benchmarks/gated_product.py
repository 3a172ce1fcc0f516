"""Gate, up and SiLU of a feed-forward part: one Hopper kernel, checked against float32, next to cuBLAS and a kernel.

    python benchmarks/gated_product.py
    python benchmarks/gated_product.py --shapes qwen3-0.6b --tokens 512 1024

A time is that of one layer in a CUDA graph of several, each with weights of its own, so that none are in the L2 cache;
between two replays the GPU rests, as it becomes slower without. The ratio is that of what `gated_product` chooses to
cuBLAS and the kernel behind it. Takes about a minute.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import torch
from decode_attention import graph_us
from prefill_checks import relative_error

from worker.gated_tilings import TILINGS, choose_tiling
from worker.triton_gated import launch_behind_cublas
from worker.triton_products import launch_gated_product

SHAPES = {"qwen3-8b": (4096, 12288), "qwen3-0.6b": (1024, 3072), "llama-3.2-1b": (2048, 8192)}
"""(inputs, outputs)"""
WEIGHTS_BYTES = 2 << 30
MAX_ERROR = 1 / 128
REPEATS = 20
REST_S = 0.005


def reference(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the gated product in float32."""
    gate, up = (inputs.float() @ weight.float().T).chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


def microseconds(
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    inputs: torch.Tensor,
    weights: Sequence[torch.Tensor],
) -> float:
    """Return the median time of one product, of a graph that computes one with each weight."""

    def all_products() -> None:
        for weight in weights:
            compute(inputs, weight)

    return graph_us(all_products, repeats=REPEATS, rest_s=REST_S) / len(weights)


def main() -> int:
    """Check, measure, print the table. Returns 1 if a check failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["qwen3-8b"])
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=[8, 32, 64, 96, 128, 256, 384, 512, 1024, 2048, 4096, 8192]
    )
    args = parser.parse_args()
    num_multiprocessors = torch.cuda.get_device_properties("cuda").multi_processor_count
    columns = [f"tiles of {tiling.tokens}" for tiling in TILINGS]
    failures = []
    print(
        f"{'shape':<14}{'tokens':>7}{'cuBLAS':>9}{'+ kernel':>9}",
        *(f"{c:>13}" for c in columns),
        "   chosen  ratio",
    )
    for shape in args.shapes:
        num_inputs, num_outputs = SHAPES[shape]
        options = {"device": "cuda", "dtype": torch.bfloat16}
        scale = 2 / num_inputs**0.5
        count = max(WEIGHTS_BYTES // (4 * num_inputs * num_outputs), 1)
        weights = [torch.randn(2 * num_outputs, num_inputs, **options) * scale for _ in range(count)]
        for num_tokens in args.tokens:
            inputs = torch.randn(num_tokens, num_inputs, **options)
            expected = reference(inputs, weights[0])
            kernels = [
                launch_behind_cublas,
                *(lambda x, w, t=tiling: launch_gated_product(x, w, t) for tiling in TILINGS),
            ]
            for name, kernel in zip(["cuBLAS + kernel", *columns], kernels, strict=True):
                error = relative_error(kernel(inputs, weights[0]).float(), expected)
                if not error <= MAX_ERROR:
                    failures.append(f"{shape}, {num_tokens} tokens, {name}: error {error:.2g}")
            alone = microseconds(lambda x, w: x @ w.T, inputs, weights)
            behind, *tiled = (microseconds(kernel, inputs, weights) for kernel in kernels)
            chosen = choose_tiling(
                num_tokens, num_inputs, num_outputs, num_multiprocessors=num_multiprocessors
            )
            best = behind if chosen is None else tiled[TILINGS.index(chosen)]
            print(
                f"{shape:<14}{num_tokens:>7}{alone:9.1f}{behind:9.1f}",
                *(f"{us:13.1f}" for us in tiled),
                f"{'cuBLAS' if chosen is None else chosen.tokens:>9}{best / behind:7.3f}",
                flush=True,
            )
    for failure in failures:
        print("FAILED", failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
