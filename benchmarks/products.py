"""The products of a layer at few tokens: cuBLAS next to our tilings, and a chain of layers with and without prefetches.

    python benchmarks/products.py
    python benchmarks/products.py --tokens 128 256 --skip-tilings

Every kernel is checked against float32 first. A time is that of one product, or one layer, in a CUDA graph of several,
each with weights of its own, so that none are in the L2 cache; between two replays the GPU rests. What adds up a split
product's parts is timed with it, without the norm. The chain is rotation, attention, output projection, norm, gated
product, down projection, norm and the next layer's query, key and value projection. Some two
minutes, half of them for compiling.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch

from gated_product import MAX_ERROR, WEIGHTS_BYTES, microseconds, relative_error
from worker import launching
from worker.split_tilings import TILINGS, SplitTiling, choose_split_tiling
from worker.triton_gated import launch_gated
from worker.triton_kernels import launch_attention, launch_rotate
from worker.triton_plain import add_up, add_up_and_norm
from worker.triton_products import launch_split_sums
from worker.weight_prefetch import ATTENTION_BYTES, PRODUCT_BYTES, ROTATION_BYTES

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER = 32, 8, 128, 4096, 12288
SHAPES = {"qkv": (HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM), "o": (HIDDEN, HIDDEN), "down": (INNER, HIDDEN)}
"""(inputs, outputs) of Qwen3-8B"""
NUM_LAYERS = 12
NUM_PROMPTS = 8
PAGE_SIZE = 64
EPS = 1e-6
OPTIONS = {"device": "cuda", "dtype": torch.bfloat16}
Chosen = dict[str, SplitTiling | None]


def random_weight(num_outputs: int, num_inputs: int) -> torch.Tensor:
    """Return a weight that leaves the size of its input as it is."""
    return torch.randn(num_outputs, num_inputs, **OPTIONS) / num_inputs**0.5


def split_product(inputs: torch.Tensor, weight: torch.Tensor, tiling: SplitTiling) -> torch.Tensor:
    """Return the product by the split kernel and what adds it up."""
    return add_up(launch_split_sums(inputs, weight, tiling), inputs.dtype)


def time_tilings(num_tokens: int, failures: list[str]) -> Chosen:
    """Check and time each product with each tiling; print the table, and return the fastest, None being cuBLAS."""
    fastest: Chosen = {}
    for name, (num_inputs, num_outputs) in SHAPES.items():
        count = max(WEIGHTS_BYTES // (2 * num_inputs * num_outputs), 1)
        weights = [random_weight(num_outputs, num_inputs) for _ in range(count)]
        inputs = torch.randn(num_tokens, num_inputs, **OPTIONS)
        expected = inputs.float() @ weights[0].float().T
        times: dict[SplitTiling | None, float] = {None: microseconds(lambda x, w: x @ w.T, inputs, weights)}
        for tiling in TILINGS:
            # Not those that would compute more pads than tokens, or have less than a ring to do.
            if tiling.tokens >= 2 * max(num_tokens, 64) or tiling.steps(num_inputs) < tiling.num_stages:
                continue
            error = relative_error(split_product(inputs, weights[0], tiling), expected)
            if not error <= MAX_ERROR:
                failures.append(f"{name}, {num_tokens} tokens, {tiling}: error {error:.2g}")
            times[tiling] = microseconds(lambda x, w, t=tiling: split_product(x, w, t), inputs, weights)
        fastest[name] = min(times, key=lambda tiling: times[tiling])
        chosen = choose_split_tiling(num_tokens, num_inputs, num_outputs, num_multiprocessors=132)
        weight_us = 2 * num_inputs * num_outputs / 4.3e6
        print(
            f"{num_tokens:5} {name:<5} read {weight_us:5.1f}  cuBLAS {times[None]:6.1f}  chosen {label(chosen)} ",
            *(f"{label(tiling)} {us:.1f}" for tiling, us in sorted(times.items(), key=lambda i: i[1])[:5]),
            sep="  ",
            flush=True,
        )
    return fastest


def label(tiling: SplitTiling | None) -> str:
    """Return rows x tokens / splits."""
    if tiling is None:
        return "cuBLAS"
    return f"{64 * tiling.num_groups}x{tiling.tokens}/{tiling.num_splits}"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer's weights, and the next one's projection to queries, keys and values."""

    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv: torch.Tensor

    @staticmethod
    def random() -> Layer:
        """Return a layer of the Qwen3-8B shape."""
        return Layer(
            o=random_weight(HIDDEN, HIDDEN),
            gate_up=random_weight(2 * INNER, HIDDEN),
            down=random_weight(HIDDEN, INNER),
            qkv=random_weight(SHAPES["qkv"][1], HIDDEN),
        )


class Chain:
    """Computes a layer after the other on buffers of its own, with such tilings, and prefetches if `ahead`."""

    def __init__(self, num_tokens: int, tilings: Chosen, *, ahead: bool) -> None:
        self._tilings, self._ahead = tilings, ahead
        length = num_tokens // NUM_PROMPTS
        ints = {"device": "cuda", "dtype": torch.int32}
        self._starts = torch.arange(NUM_PROMPTS + 1, **ints) * length
        self._cached = torch.zeros(NUM_PROMPTS, **ints)
        num_pages = -(-length // PAGE_SIZE)
        self._pages = torch.arange(NUM_PROMPTS * num_pages, **ints).view(NUM_PROMPTS, num_pages)
        layer_size = NUM_PROMPTS * num_pages * PAGE_SIZE * KV_HEADS * HEAD_DIM
        self._pool, self._values_offset = torch.zeros(2 * layer_size, **OPTIONS), layer_size
        self._head_norm, self._norm = torch.ones(HEAD_DIM, **OPTIONS), torch.ones(HIDDEN, **OPTIONS)
        # The same in each, so that chains can be compared.
        angles = torch.linspace(0, 8, num_tokens * HEAD_DIM, **OPTIONS).view(num_tokens, HEAD_DIM)
        self._cos, self._sin = angles.cos(), angles.sin()

    def __call__(self, qkv: torch.Tensor, residual: torch.Tensor, layer: Layer) -> tuple[torch.Tensor, ...]:
        """Return the next layer's queries, keys and values, and the residual."""
        heads = qkv.view(qkv.shape[0], -1, HEAD_DIM)
        query, key, value = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
        rotated_ahead = (layer.o, ROTATION_BYTES) if self._ahead else ()
        query, key = launch_rotate(
            query, key, self._head_norm, self._head_norm, self._cos, self._sin, EPS, 0.0, *rotated_ahead
        )
        attended_ahead = (layer.o, ROTATION_BYTES, ATTENTION_BYTES) if self._ahead else ()
        attended = launch_attention(
            query, key, value, self._pool, self._starts, self._cached, self._pages, 0, self._values_offset,
            PAGE_SIZE, HEAD_DIM**-0.5, 0, 0.0, *attended_ahead,
        )  # fmt: skip
        sums = self._sums("o", attended.flatten(1), layer.o, layer.gate_up)
        residual, normed = add_up_and_norm(sums, residual, self._norm, EPS, 0.0)
        gated = launch_gated(normed, layer.gate_up, *((layer.down, PRODUCT_BYTES) if self._ahead else ()))
        sums = self._sums("down", gated, layer.down, layer.qkv)
        residual, normed = add_up_and_norm(sums, residual, self._norm, EPS, 0.0)
        sums = self._sums("qkv", normed, layer.qkv, None)
        return (add_up(sums, qkv.dtype) if self._tilings["qkv"] else sums[0]), residual

    def _sums(
        self, name: str, inputs: torch.Tensor, weight: torch.Tensor, following: torch.Tensor | None
    ) -> torch.Tensor:
        tiling = self._tilings[name]
        if tiling is None:
            return (inputs @ weight.T).unsqueeze(0)
        if following is None or not self._ahead:
            return launch_split_sums(inputs, weight, tiling)
        return launch_split_sums(inputs, weight, tiling, next_weight=following, next_bytes=PRODUCT_BYTES)


def time_chains(num_tokens: int, fastest: Chosen, failures: list[str]) -> None:
    """Time a layer of a chain of several with cuBLAS and with the fastest tilings, each without and with prefetches."""
    layers = [Layer.random() for _ in range(NUM_LAYERS)]
    cublas: Chosen = dict.fromkeys(SHAPES)
    qkv, residual = (torch.randn(num_tokens, size, **OPTIONS) for size in (SHAPES["qkv"][1], HIDDEN))
    expected, _ = Chain(num_tokens, cublas, ahead=False)(qkv, residual, layers[0])
    for overlaps, tilings, ahead in product((False, True), (cublas, fastest), (False, True)):
        launching.OVERLAPS = overlaps
        chain = Chain(num_tokens, tilings, ahead=ahead)
        error = relative_error(chain(qkv, residual, layers[0])[0], expected.float())
        if not error <= 2 * MAX_ERROR:
            failures.append(f"chain, {num_tokens} tokens, ahead {ahead}, overlaps {overlaps}: error {error:.2g}")
        us = microseconds(chain_of(chain, qkv), residual, layers)
        names = ", ".join(f"{name} {label(tiling)}" for name, tiling in tilings.items())
        print(
            f"{num_tokens:5} layer {us:6.1f}  {'overlaps' if overlaps else '-':<8}  "
            f"{'prefetches' if ahead else '-':<10}  {names}",
            flush=True,
        )


def chain_of(chain: Chain, qkv: torch.Tensor) -> Callable[[torch.Tensor, Layer], torch.Tensor]:
    """Return what computes one layer after the one that it computed before."""
    # All are kept: a replay reads again what came before its graph.
    states = [qkv]

    def step(residual: torch.Tensor, layer: Layer) -> torch.Tensor:
        following, residual = chain(states[-1], residual, layer)
        states.append(following)
        return residual

    return step


def main() -> int:
    """Check, measure, print. Returns 1 if a check failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=[16, 64, 128, 256, 512])
    parser.add_argument("--skip-tilings", action="store_true", help="chains with the chosen tilings only")
    args = parser.parse_args()
    failures: list[str] = []
    for num_tokens in args.tokens:
        if args.skip_tilings:
            fastest: Chosen = {
                name: choose_split_tiling(num_tokens, *shape, num_multiprocessors=132)
                for name, shape in SHAPES.items()
            }
        else:
            fastest = time_tilings(num_tokens, failures)
        time_chains(num_tokens, fastest, failures)
    for failure in failures:
        print("FAILED", failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
