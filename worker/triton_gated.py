"""The kernels behind `worker.gated_kernels`: one for products and SiLU on Hopper, or SiLU alone behind cuBLAS."""

from __future__ import annotations

import threading
from functools import cache

import torch
import triton
import triton.language as tl

from worker.gated_tilings import TILINGS, Tiling, choose_tiling
from worker.launching import overlap_options
from worker.triton_ahead import begin_kernel

_BLOCK = 1024
_HOPPER = (9, 0)


def launch_gated(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    next_weight: torch.Tensor | None = None,
    next_bytes: int = 0,
) -> torch.Tensor:
    """Do as `worker.gated_kernels.gated_product` says."""
    tiling = _tiling(inputs, weight)
    if tiling is not None:
        from worker.triton_products import launch_gated_product  # Gluon is of no use elsewhere.

        return launch_gated_product(inputs, weight, tiling, next_weight=next_weight, next_bytes=next_bytes)
    return launch_behind_cublas(inputs, weight)


def launch_behind_cublas(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Do the same by a matrix product of cuBLAS and a kernel behind it."""
    num_tokens, num_outputs = inputs.shape[0], weight.shape[0] // 2
    products = inputs @ weight.T
    out = products.new_empty(num_tokens, num_outputs)
    grid = (num_tokens, triton.cdiv(num_outputs, _BLOCK))
    options = overlap_options(inputs.device)
    _gate_kernel[grid](products, out, num_outputs, BLOCK=_BLOCK, num_warps=4, **options)
    return out


def compile_ahead(weight: torch.Tensor) -> None:
    """Compile, in the background, what products with this weight need: while the model is traced there is time."""
    inputs = weight.new_empty(TILINGS[0].tokens, weight.shape[1])
    if _tiling(inputs, weight) is not None:
        threading.Thread(target=_compile_all, args=(inputs, weight), daemon=True).start()


def _compile_all(inputs: torch.Tensor, weight: torch.Tensor) -> None:
    from worker.triton_products import launch_gated_product

    with torch.cuda.device(inputs.device):
        for tiling in TILINGS:
            launch_gated_product(inputs, weight, tiling, only_compile=True)


def _tiling(inputs: torch.Tensor, weight: torch.Tensor) -> Tiling | None:
    """Return how the kernel for Hopper computes this, or None if it does not, or is slower."""
    device = inputs.device
    if device.type != "cuda" or inputs.dtype is not torch.bfloat16 or not inputs.is_contiguous():
        return None
    capability, num_multiprocessors = _properties(device)
    if capability != _HOPPER:
        return None
    num_tokens, num_inputs = inputs.shape
    return choose_tiling(
        num_tokens, num_inputs, weight.shape[0] // 2, num_multiprocessors=num_multiprocessors
    )


@cache
def _properties(device: torch.device) -> tuple[tuple[int, int], int]:
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.multi_processor_count


@triton.jit
def _gate_kernel(
    products,  # [T, 2 I], contiguous
    out,  # [T, I], contiguous
    num_outputs,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Make SiLU of gate, times up, of some outputs of one token."""
    begin_kernel(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_outputs
    row = products + token * 2 * num_outputs
    gate = tl.load(row + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row + num_outputs + columns, mask=mask, other=0.0).to(tl.float32)
    value = gate * up / (1.0 + tl.exp(-gate))
    tl.store(out + token * num_outputs + columns, value.to(out.dtype.element_ty), mask=mask)
