"""The gated product's kernel against float32, at numbers of tokens and shapes that leave tiles half empty."""

from __future__ import annotations

import pytest
import torch

from worker.gated_kernels import gated_product
from worker.gated_tilings import TILINGS, choose_tiling
from worker.split_tilings import TILINGS as SPLIT_TILINGS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
    # torch and inductor warn of much that is not ours.
    pytest.mark.filterwarnings("default"),
]


def gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, up = (x.float() @ weight.float().t()).chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


def operands(num_tokens: int, num_inputs: int, num_outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(num_tokens)
    x = torch.randn(num_tokens, num_inputs, device="cuda", generator=generator)
    weight = torch.randn(2 * num_outputs, num_inputs, device="cuda", generator=generator)
    return x.bfloat16(), (weight * (2 / num_inputs**0.5)).bfloat16()


@pytest.mark.parametrize(
    ("num_tokens", "num_inputs", "num_outputs"),
    [
        *((num_tokens, 512, 384) for num_tokens in (1, 63, 64, 65, 77, 128, 129, 500, 512, 1000)),
        (300, 448, 1000),  # neither a multiple of a tile's rows nor of its columns
        (700, 4096, 12288),  # several tiles for each multiprocessor
    ],
)
def test_gated_product_is_that_of_float32(num_tokens: int, num_inputs: int, num_outputs: int) -> None:
    from worker.triton_products import launch_gated_product  # Triton comes with CUDA only.

    x, weight = operands(num_tokens, num_inputs, num_outputs)
    for tiling in TILINGS:
        out = launch_gated_product(x, weight, tiling)
        torch.testing.assert_close(out.float(), gated(x, weight), rtol=1 / 128, atol=1e-2)


def test_replays_of_a_captured_product_follow_its_input() -> None:
    x, weight = operands(200, 4096, 12288)
    other, _ = operands(201, 4096, 12288)
    assert choose_tiling(200, 4096, 12288, num_multiprocessors=132) is not None
    gated_product(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gated_product(x, weight)
    x.copy_(other[:200])
    graph.replay()
    torch.testing.assert_close(out.float(), gated(x, weight), rtol=1 / 128, atol=1e-2)


@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(520, 384), (64, 384), (512, 380)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_shapes_and_types_are_products_of_cublas_and_a_kernel_behind_them(
    num_inputs: int, num_outputs: int, dtype: torch.dtype
) -> None:
    x, weight = (operand.to(dtype) for operand in operands(300, num_inputs, num_outputs))
    torch.testing.assert_close(gated_product(x, weight).float(), gated(x, weight), rtol=1 / 50, atol=3e-2)


@pytest.mark.parametrize(
    ("num_tokens", "num_inputs", "num_outputs"),
    [
        *((num_tokens, 4096, 4096) for num_tokens in (1, 16, 77, 128, 256, 300)),
        (128, 2048 + 64, 1008),  # neither splits nor rows fill a tile
    ],
)
def test_split_product_sum_and_norm_are_those_of_float32(
    num_tokens: int, num_inputs: int, num_outputs: int
) -> None:
    from worker.triton_plain import add_up, add_up_and_norm
    from worker.triton_products import launch_split_sums

    x, weight = operands(num_tokens, num_inputs, num_outputs // 2)
    residual = torch.randn(num_tokens, num_outputs, device="cuda", dtype=torch.bfloat16)
    norm_weight = weight[:, 0].contiguous()
    product = x.float() @ weight.float().t()
    total = product + residual.float()
    normed = total * torch.rsqrt(total.pow(2).mean(1, keepdim=True) + 1e-6) * (norm_weight.float() + 1.0)
    for tiling in SPLIT_TILINGS:
        if tiling.steps(num_inputs) < tiling.num_stages:
            continue
        # Another weight is asked for, in more parts than one.
        sums = launch_split_sums(x, weight, tiling, next_weight=weight, next_bytes=weight.nbytes // 16 * 16)
        torch.testing.assert_close(add_up(sums, x.dtype).float(), product, rtol=1 / 128, atol=1e-2)
        outputs = add_up_and_norm(sums, residual, norm_weight, 1e-6, 1.0)
        for output, expected in zip(outputs, (total, normed), strict=True):
            torch.testing.assert_close(output.float(), expected, rtol=1 / 128, atol=1e-2)


def test_gated_product_does_not_depend_on_what_it_asks_for() -> None:
    from worker.triton_products import launch_gated_product

    x, weight = operands(100, 4096, 12288)
    for tiling in TILINGS:
        plain = launch_gated_product(x, weight, tiling)
        ahead = launch_gated_product(x, weight, tiling, next_weight=weight, next_bytes=12 << 20)
        torch.testing.assert_close(ahead, plain, rtol=0, atol=0)


def test_rotation_does_not_depend_on_what_it_asks_for() -> None:
    from worker.kernels import rotate

    query, key = (torch.randn(100, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (32, 8))
    cos, sin = torch.randn(2, 100, 128, device="cuda", dtype=torch.bfloat16)
    _, weight = operands(1, 4096, 4096)
    plain = rotate(query, key, None, None, cos, sin, 0.0, 0.0)
    ahead = rotate(query, key, None, None, cos, sin, 0.0, 0.0, weight, 8 << 20)
    for one, other in zip(ahead, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
