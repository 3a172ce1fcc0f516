"""Measured times of one NVIDIA H200, for benchmarks that need no GPU."""

from __future__ import annotations

from graphs.buckets import default_token_ladder
from scheduler.batching.cost_model import CostModel

QWEN3_8B_SECONDS = {128: 0.0056, 256: 0.0077, 512: 0.0127, 1024: 0.024, 4096: 0.0971, 8192: 0.2005}
"""Seconds of one pure-prefill batch by its tokens: Qwen3-8B in bf16, merged weights, one full CUDA graph.

The last was measured without merged weights.
"""
MAX_CAPTURE_TOKENS = 4096


def qwen3_8b() -> CostModel:
    """Return the cost model of the default ladder, interpolated by tokens."""
    return CostModel.interpolated(default_token_ladder(MAX_CAPTURE_TOKENS), QWEN3_8B_SECONDS)
