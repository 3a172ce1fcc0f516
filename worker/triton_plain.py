"""The kernels behind `worker.product_kernels`: a product in parts on Hopper, or cuBLAS, and what adds up its parts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.launching import overlap_options
from worker.split_tilings import SplitTiling, choose_split_tiling
from worker.triton_ahead import begin_kernel

_BLOCK = 1024
_HOPPER = (9, 0)


def launch_product(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    next_weight: torch.Tensor | None = None,
    next_bytes: int = 0,
) -> torch.Tensor:
    """Do as `worker.product_kernels.product` says."""
    tiling = _tiling(inputs, weight)
    if tiling is None:
        return inputs @ weight.T
    return add_up(_sums(inputs, weight, tiling, next_weight, next_bytes), inputs.dtype)


def launch_product_norm(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight_offset: float,
    next_weight: torch.Tensor | None = None,
    next_bytes: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do as `worker.product_kernels.product_norm` says."""
    tiling = _tiling(inputs, weight)
    sums = (
        (inputs @ weight.T).unsqueeze(0)
        if tiling is None
        else _sums(inputs, weight, tiling, next_weight, next_bytes)
    )
    return add_up_and_norm(sums, residual, norm_weight, eps, weight_offset)


def add_up(sums: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum of ``[splits, T, N]`` over splits."""
    num_splits, num_tokens, num_outputs = sums.shape
    out = sums.new_empty(num_tokens, num_outputs, dtype=dtype)
    grid = (num_tokens, triton.cdiv(num_outputs, _BLOCK))
    _add_up_kernel[grid](
        sums,
        out,
        num_tokens,
        num_outputs,
        NUM_SPLITS=num_splits,
        BLOCK=_BLOCK,
        **overlap_options(sums.device),
        num_warps=4,
    )
    return out


def add_up_and_norm(
    sums: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight_offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of ``[splits, T, N]`` over splits plus `residual`, and its norm, as `product_norm` does."""
    num_splits, num_tokens, num_outputs = sums.shape
    total, normed = torch.empty_like(residual), torch.empty_like(residual)
    _add_up_and_norm_kernel[(num_tokens,)](
        sums,
        residual,
        norm_weight,
        total,
        normed,
        num_tokens,
        num_outputs,
        eps,
        weight_offset,
        NUM_SPLITS=num_splits,
        BLOCK=triton.next_power_of_2(num_outputs),
        **overlap_options(sums.device),
        num_warps=8,
    )
    return total, normed


def _sums(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    tiling: SplitTiling,
    next_weight: torch.Tensor | None,
    next_bytes: int,
) -> torch.Tensor:
    from worker.triton_products import launch_split_sums  # Gluon is of no use elsewhere.

    return launch_split_sums(inputs, weight, tiling, next_weight=next_weight, next_bytes=next_bytes)


def _tiling(inputs: torch.Tensor, weight: torch.Tensor) -> SplitTiling | None:
    """Return how the kernel for Hopper computes this, or None if it does not, or is slower."""
    if inputs.dtype is not torch.bfloat16 or not (inputs.is_contiguous() and weight.is_contiguous()):
        return None
    properties = torch.cuda.get_device_properties(inputs.device)
    if (properties.major, properties.minor) != _HOPPER:
        return None
    (num_tokens, num_inputs), num_outputs = inputs.shape, weight.shape[0]
    return choose_split_tiling(
        num_tokens, num_inputs, num_outputs, num_multiprocessors=properties.multi_processor_count
    )


# Without this a bucket of an odd number of tokens would compile a kernel of its own.
@triton.jit(do_not_specialize=["num_tokens"])
def _add_up_kernel(
    sums,  # [splits, T, N], contiguous
    out,  # [T, N], contiguous
    num_tokens,
    num_outputs,
    NUM_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Add up some outputs of one token."""
    begin_kernel(OVERLAPS)
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_outputs
    value = _added_up(sums, token, columns, mask, num_tokens, num_outputs, NUM_SPLITS, BLOCK)
    tl.store(out + token.to(tl.int64) * num_outputs + columns, value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _add_up_and_norm_kernel(
    sums,  # [splits, T, N], contiguous
    residual,  # [T, N], contiguous
    norm_weight,  # [N]
    total,  # [T, N], contiguous
    normed,  # [T, N], contiguous
    num_tokens,
    num_outputs,
    eps,
    weight_offset,
    NUM_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Add up one token's outputs and its residual, and norm that."""
    begin_kernel(OVERLAPS)
    token = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < num_outputs
    offsets = token.to(tl.int64) * num_outputs + columns
    value = _added_up(sums, token, columns, mask, num_tokens, num_outputs, NUM_SPLITS, BLOCK)
    value += tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(norm_weight + columns, mask=mask, other=0.0).to(tl.float32) + weight_offset
    scale = tl.rsqrt(tl.sum(value * value, 0) / num_outputs + eps)
    tl.store(total + offsets, value.to(total.dtype.element_ty), mask=mask)
    tl.store(normed + offsets, (value * scale * weight).to(normed.dtype.element_ty), mask=mask)


@triton.jit
def _added_up(
    sums, token, columns, mask, num_tokens, num_outputs, NUM_SPLITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    value = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        row = (split * num_tokens + token).to(tl.int64) * num_outputs
        value += tl.load(sums + row + columns, mask=mask, other=0.0).to(tl.float32)
    return value
