"""The gated product's kernel against float32, at numbers of tokens and shapes that leave tiles half empty."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
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
    from worker.triton_products import is_supported, launch_gated_product

    assert is_supported(num_inputs, num_outputs)
    x, weight = operands(num_tokens, num_inputs, num_outputs)
    torch.testing.assert_close(
        launch_gated_product(x, weight).float(), gated(x, weight), rtol=1 / 128, atol=1e-2
    )


def test_replays_of_a_captured_product_follow_its_input() -> None:
    from worker.triton_products import launch_gated_product

    x, weight = operands(200, 512, 384)
    other, _ = operands(201, 512, 384)
    launch_gated_product(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch_gated_product(x, weight)
    x.copy_(other[:200])
    graph.replay()
    torch.testing.assert_close(out.float(), gated(x, weight), rtol=1 / 128, atol=1e-2)


@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(520, 384), (64, 384), (512, 380)])
def test_other_shapes_are_not_supported(num_inputs: int, num_outputs: int) -> None:
    from worker.triton_products import is_supported

    assert not is_supported(num_inputs, num_outputs)
