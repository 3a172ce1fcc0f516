"""How often Triton compiles the kernels of attention. For an H200, which need not be there: nothing is run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton's compiler, not its interpreter", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import MockTensor

from graphs.buckets import StepLadder, default_token_ladder
from worker import triton_decode, triton_kernels

LAYER_ELEMENTS = 1 << 30
"""Keys of a layer of a large pool: the first layers begin within 32 bits, the others do not."""


class _H200:
    """What Triton asks of a driver while it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _Aligned(MockTensor):
    @staticmethod
    def data_ptr() -> int:
        return 0


class _Compiled:
    """Stands for a kernel: a launch compiles it, if that must be done, and runs nothing."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: object, **options: object) -> None:
            mocks = [_Aligned(arg.dtype) if isinstance(arg, torch.Tensor) else arg for arg in args]
            self._kernel.warmup(*mocks, grid=grid, **options)

        return launch

    @property
    def num_versions(self) -> int:
        return sum(len(caches[0]) for caches in self._kernel.device_caches.values())


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Any, str], _Compiled]:
    """Return what puts a `_Compiled` in the place of a module's kernel of this name."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton_decode, "_num_multiprocessors", lambda device: 132)

    def replace(module: Any, name: str) -> _Compiled:
        kernel = _Compiled(getattr(module, name))
        monkeypatch.setattr(module, name, kernel)
        return kernel

    # Not by its own functions: without a GPU there is no driver to go back to.
    monkeypatch.setattr(driver, "_active", _H200())
    return replace


def _on_no_device(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_steps_of_all_sizes_and_layers_take_one_version(
    compiled: Callable[[Any, str], _Compiled],
) -> None:
    names = ("_plan_kernel", "_decode_kernel", "_combine_kernel")
    kernels = {name: compiled(triton_decode, name) for name in names}
    pool = _on_no_device(1, dtype=torch.bfloat16)
    for bucket in StepLadder(64).buckets:
        slots = bucket.num_slots
        starts, cached, pages = _on_no_device(slots + 1), _on_no_device(slots), _on_no_device(slots, 8)
        query = _on_no_device(slots, 8, 64, dtype=torch.bfloat16)
        key = _on_no_device(slots, 2, 64, dtype=torch.bfloat16)
        plan = triton_decode.launch_plan(starts, cached, 0)
        for layer in range(3):
            offsets = 2 * layer * LAYER_ELEMENTS, (2 * layer + 1) * LAYER_ELEMENTS
            triton_decode.launch_decode(
                query, key, key, pool, plan, cached, pages, *offsets, 64, 0.125, 0, 0.0
            )
    assert {name: kernel.num_versions for name, kernel in kernels.items()} == dict.fromkeys(names, 1)


def test_prefill_of_all_sizes_and_layers_takes_a_version_for_few_tokens_and_one_for_many(
    compiled: Callable[[Any, str], _Compiled],
) -> None:
    kernel = compiled(triton_kernels, "_attention_kernel")
    pool, slots = _on_no_device(1, dtype=torch.bfloat16), 8
    starts, cached, pages = _on_no_device(slots + 1), _on_no_device(slots), _on_no_device(slots, 8)
    for num_tokens in default_token_ladder(8192):
        query = _on_no_device(num_tokens, 8, 64, dtype=torch.bfloat16)
        key = _on_no_device(num_tokens, 2, 64, dtype=torch.bfloat16)
        for layer in range(3):
            offsets = 2 * layer * LAYER_ELEMENTS, (2 * layer + 1) * LAYER_ELEMENTS
            triton_kernels.launch_attention(
                query, key, key, pool, starts, cached, pages, *offsets, 64, 0.125, 0, 0.0
            )
    assert kernel.num_versions == 2


def test_importing_the_compiler_leaves_nothing_to_import_and_names_the_caches(tmp_path: Path) -> None:
    # In a process of its own, which may import it for the first time.
    code = """
import os, sys
from types import SimpleNamespace
from worker import startup
startup.import_compiler(SimpleNamespace(compile_cache_folder=sys.argv[1]))
assert os.environ["TRITON_CACHE_DIR"].startswith(sys.argv[1]), os.environ["TRITON_CACHE_DIR"]
names = ("torch._inductor.compile_fx", "triton", "worker.compiled", "worker.triton_kernels")
assert not (missing := [name for name in names if name not in sys.modules]), missing
"""
    own = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
    environment = {name: value for name, value in os.environ.items() if name not in own}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True, timeout=120)
