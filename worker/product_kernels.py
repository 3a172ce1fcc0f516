"""Matrix products as operators that choose between cuBLAS and our own kernels by the number of tokens, at run time.

While they compute, all of them can ask for the next product's weight: `next_bytes` of `next_weight`, a multiple of 16,
come to the L2 cache then. Nothing depends on whether they do.
"""

from __future__ import annotations

import torch


@torch.library.custom_op("purefill::product", mutates_args=())
def product(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    next_weight: torch.Tensor | None = None,
    next_bytes: int = 0,
) -> torch.Tensor:
    """Return ``inputs @ weight^T``, ``[T, N]``. `inputs` is ``[T, K]``, `weight` ``[N, K]``."""
    if inputs.device.type == "cuda":
        from worker.triton_plain import launch_product

        return launch_product(inputs, weight, next_weight, next_bytes)
    return inputs @ weight.T


@product.register_fake
def _(inputs: torch.Tensor, weight: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return inputs.new_empty(inputs.shape[0], weight.shape[0])


@torch.library.custom_op("purefill::product_norm", mutates_args=())
def product_norm(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight_offset: float,
    next_weight: torch.Tensor | None = None,
    next_bytes: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``inputs @ weight^T + residual``, ``[T, N]``, and its RMS norm, scaled by a weight plus `weight_offset`.

    `inputs` is ``[T, K]``, `weight` ``[N, K]``, `residual` ``[T, N]``, contiguous, `norm_weight` ``[N]``.
    """
    if inputs.device.type == "cuda":
        from worker.triton_plain import launch_product_norm

        return launch_product_norm(
            inputs, weight, residual, norm_weight, eps, weight_offset, next_weight, next_bytes
        )
    total = residual + inputs @ weight.T
    scale = torch.rsqrt(total.float().pow(2).mean(-1, keepdim=True) + eps)
    return total, (total.float() * scale * (norm_weight.float() + weight_offset)).to(total.dtype)


@product_norm.register_fake
def _(
    inputs: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, *_: object, **__: object
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(residual), torch.empty_like(residual)
