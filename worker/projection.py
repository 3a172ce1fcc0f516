"""Matrix products of a captured pass, each by the algorithm that was fastest when its bucket was warmed up.

torch takes the first algorithm that cuBLAS' heuristic names. Where there are few tokens that costs up to a third of
a product's time.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from functools import cache

import torch

from worker.cublaslt import ALIGNMENT_BYTES, Algorithm, CublasLt

DTYPES = (torch.bfloat16, torch.float16)
"""Types of the products for which there is a choice."""

_LOG = logging.getLogger(__name__)
_NUM_ALGORITHMS = 16
_FINALISTS = 4
"""Algorithms that are timed more than once."""
_REPEATS = 7
_FLUSH_BYTES = 256 * 2**20
"""Written before each product that is timed: more than any cache holds, as a layer's weights are not in it either."""
_MIN_GAIN = 0.01
"""By so much an algorithm must beat torch's own choice to be taken."""

Run = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_CHOSEN: dict[tuple[int, int, int, int, torch.dtype, torch.device], Run] = {}


@torch.library.custom_op("purefill::project", mutates_args=())
def project(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``inputs @ weight.T``, ``[T, out]``, of `inputs` ``[T, in]`` and `weight` ``[out, in]``.

    The first product of a shape outside a capture chooses its algorithm, by timing; later ones, and captures, use it.
    """
    key = (*weight.shape, inputs.shape[0], inputs.stride(0), inputs.dtype, inputs.device)
    run = _CHOSEN.get(key)
    if run is None:
        if not _can_choose(inputs, weight):
            return _by_torch(inputs, weight)
        run = _CHOSEN[key] = _choose(inputs, weight)
    return run(inputs, weight)


@project.register_fake
def _(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return inputs.new_empty(inputs.shape[0], weight.shape[0])


def _by_torch(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.mm(inputs, weight.t())


def _can_choose(inputs: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        inputs.is_cuda
        and not torch.cuda.is_current_stream_capturing()
        and inputs.dtype in DTYPES
        and inputs.stride(1) == weight.stride(1) == 1
        and inputs.shape[0] > 0
    )


@cache
def _library(device: torch.device) -> CublasLt | None:
    try:
        return CublasLt(device)
    except (OSError, RuntimeError) as error:
        _LOG.warning("matrix products use the algorithms that torch takes: %s", error)
        return None


def _choose(inputs: torch.Tensor, weight: torch.Tensor) -> Run:
    """Return the fastest way to compute a product of this shape."""
    candidates: list[Run] = [_by_torch, *_algorithms(inputs, weight)]
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=inputs.device)
    times = {i: _times_ms(run, inputs, weight, flush, 2)[-1] for i, run in enumerate(candidates)}
    finalists = {0, *sorted(times, key=times.__getitem__)[:_FINALISTS]}
    medians = {
        i: statistics.median(_times_ms(candidates[i], inputs, weight, flush, _REPEATS)) for i in finalists
    }
    best = min(medians, key=medians.__getitem__)
    chosen = best if medians[best] < (1 - _MIN_GAIN) * medians[0] else 0
    _LOG.debug(
        "%d x %s: %.1f us with algorithm %d of %d, torch's own takes %.1f us",
        inputs.shape[0], tuple(weight.shape), medians[chosen] * 1e3, chosen, len(candidates), medians[0] * 1e3,
    )  # fmt: skip
    return candidates[chosen]


def _algorithms(inputs: torch.Tensor, weight: torch.Tensor) -> list[Run]:
    library = _library(inputs.device)
    if library is None:
        return []
    try:
        product = library.product(inputs.shape[0], weight, row_stride=inputs.stride(0))
        algorithms = product.algorithms(_NUM_ALGORITHMS)
    except RuntimeError as error:
        _LOG.debug("a product of %s by %s is torch's: %s", tuple(inputs.shape), tuple(weight.shape), error)
        return []

    def bind(algorithm: Algorithm) -> Run:
        def run(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            if (inputs.data_ptr() | weight.data_ptr()) % ALIGNMENT_BYTES:
                return _by_torch(inputs, weight)
            outputs = inputs.new_empty(inputs.shape[0], weight.shape[0])
            product.run(algorithm, inputs, weight, outputs)
            return outputs

        return run

    return [bind(algorithm) for algorithm in algorithms]


def _times_ms(
    run: Run, inputs: torch.Tensor, weight: torch.Tensor, flush: torch.Tensor, repeats: int
) -> list[float]:
    """Return the times of some runs, each with nothing in the device's caches."""
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)
    ]
    for start, end in events:
        flush.zero_()
        start.record()
        run(inputs, weight)
        end.record()
    events[-1][1].synchronize()
    return [start.elapsed_time(end) for start, end in events]
