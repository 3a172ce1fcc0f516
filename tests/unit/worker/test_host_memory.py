from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from worker.host_memory import keep_freed_memory

MIB = 2**20


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_the_memory_of_a_freed_tensor_stays_with_the_process() -> None:
    assert keep_freed_memory()
    tensor = torch.ones(64 * MIB, dtype=torch.uint8)
    with_tensor = resident_bytes()
    del tensor
    assert resident_bytes() > with_tensor - 32 * MIB
