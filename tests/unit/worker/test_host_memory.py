from __future__ import annotations

import mmap
import platform
import sys
from pathlib import Path

import pytest
import torch

from worker.host_memory import keep_freed_memory, use_huge_pages

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


def anonymous_huge_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages"))


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_memory_that_fills_huge_pages_is_put_into_them() -> None:
    with mmap.mmap(-1, 16 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        expected = torch.arange(len(tensor)).to(torch.uint8)
        tensor.copy_(expected)
        before = anonymous_huge_bytes()
        count = use_huge_pages([(tensor.data_ptr(), tensor.nbytes)])
        if count == 0:
            pytest.skip("this system makes no huge pages on demand")
        assert count >= 7
        assert anonymous_huge_bytes() >= before + 6 * 2 * MIB
        assert torch.equal(tensor, expected)
        # A page of which little is asked for is left as it is.
        assert use_huge_pages([(tensor.data_ptr(), 4096)]) == 0
        del tensor
