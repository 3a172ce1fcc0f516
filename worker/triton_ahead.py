"""What a kernel does ahead: it asks for weights of a later one, and starts before the one before it has ended."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PREFETCH = tl.constexpr(
    "{ .reg .pred some; setp.gt.s32 some, $2, 0; mov.b32 $0, 0; "
    "@some cp.async.bulk.prefetch.L2.global [$1], $2; }"
)
"""Asks for $2 bytes at $1, both multiples of 16, unless they are none. Nothing waits for it, nor needs it."""

@triton.jit
def begin_kernel(OVERLAPS: tl.constexpr):
    """Wait until the kernel before this one has ended, and let the next one begin.

    Before that, nothing may be written, and nothing read that an earlier kernel writes. As the next kernel begins only
    then, all but the one before it have ended by its beginning: inductor's kernels rely on that.
    """
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch_share(weight, begin, num_bytes, program, num_programs, THREADS: tl.constexpr):
    """Ask for this program's share of `num_bytes` bytes from byte `begin` of a tensor on; both are multiples of 16."""
    num_threads = num_programs * THREADS
    bytes_each = tl.cdiv(tl.cdiv(num_bytes, num_threads), 16) * 16
    offsets = (program * THREADS + tl.arange(0, THREADS)) * bytes_each
    sizes = tl.minimum(bytes_each, num_bytes - offsets)
    addresses = weight.to(tl.int64) + begin + offsets
    tl.inline_asm_elementwise(PREFETCH, "=r,l,r", [addresses, sizes], dtype=tl.int32, is_pure=False, pack=1)
