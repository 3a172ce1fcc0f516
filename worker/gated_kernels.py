"""The operator of a gated feed-forward part that torch does not have: two products and what is made of them."""

from __future__ import annotations

import torch


@torch.library.custom_op("purefill::gated_product", mutates_args=())
def gated_product(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    next_weight: torch.Tensor | None = None,
    next_bytes: int = 0,
) -> torch.Tensor:
    """Return ``silu(inputs @ gate^T) * (inputs @ up^T)``, ``[T, I]``.

    `inputs` is ``[T, K]``, `weight` ``[2 I, K]``, the I rows of gate first; both contiguous. For `next_weight` and
    `next_bytes` see `worker.product_kernels`.
    """
    if inputs.device.type == "cuda":
        from worker.triton_gated import launch_gated

        return launch_gated(inputs, weight, next_weight, next_bytes)
    gate, up = (inputs @ weight.T).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@gated_product.register_fake
def _(inputs: torch.Tensor, weight: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return inputs.new_empty(inputs.shape[0], weight.shape[0] // 2)
