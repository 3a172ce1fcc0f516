"""Whether kernels are launched while the one before them still runs (CUDA's programmatic dependent launch).

A kernel that is launched so does what depends on nothing, asks for its weights above all, and then waits for the one
before it. Between two kernels of a captured pass this saves the start of the later one.
"""

from __future__ import annotations

from functools import cache

import torch

OVERLAPS = True
_FIRST_CAPABILITY = (9, 0)
"""Hopper's; older GPUs do not have it."""


def overlaps(device: torch.device) -> bool:
    """Return whether kernels on this device are launched so."""
    return OVERLAPS and device.type == "cuda" and _capability(device) >= _FIRST_CAPABILITY


def overlap_options(device: torch.device) -> dict[str, bool]:
    """Return what a Triton kernel that has a constant `OVERLAPS` is launched with."""
    value = overlaps(device)
    return {"OVERLAPS": value, "launch_pdl": value}


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
