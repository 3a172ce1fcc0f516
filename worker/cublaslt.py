"""cuBLASLt, as far as a choice among its algorithms needs it. torch takes the first that its heuristic names."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

WORKSPACE_BYTES = 32 * 2**20
"""Scratch memory that an algorithm may ask for: what NVIDIA recommends on Hopper."""
ALIGNMENT_BYTES = 256
"""What the heuristic assumes of every matrix' address."""

# Names and values as in cublasLt.h, cublas_api.h and library_types.h.
_CUBLAS_COMPUTE_32F = 68
_CUDA_R_32F = 0
_DATA_TYPES = {torch.float16: 2, torch.bfloat16: 14}
_MATMUL_DESC_TRANSA = 3
_OP_T = 1
_PREF_MAX_WORKSPACE_BYTES = 1
_PREF_REDUCTION_SCHEME_MASK = 3
_ORDERED_REDUCTIONS = 2 | 4
"""Without the scheme that adds up in the output, in whatever order its parts arrive."""


class _HeuristicResult(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``"""

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A way to compute the product that named it."""

    result: _HeuristicResult

    @property
    def workspace_bytes(self) -> int:
        """Scratch memory that it takes."""
        return int(self.result.workspace_bytes)


class CublasLt:
    """The library on one device, with the scratch memory that all products share: they run one after the other.

    Raises `OSError` if the library is not there.
    """

    def __init__(self, device: torch.device) -> None:
        self._library = ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}")
        self._handle = ctypes.c_void_p()
        self._call("cublasLtCreate", ctypes.byref(self._handle))
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

    def product(self, num_rows: int, weight: torch.Tensor, *, row_stride: int) -> Product:
        """Prepare ``inputs @ weight.T`` for `inputs` of ``[num_rows, in]`` and `weight` of ``[out, in]``.

        Both are of the same 16-bit type. Raises `RuntimeError` if cuBLASLt cannot do that.
        """
        return Product(self, num_rows, weight, row_stride)

    def _call(self, name: str, *args: object) -> None:
        status = getattr(self._library, name)(*args)
        if status != 0:
            raise RuntimeError(f"{name} failed with status {status}")


class Product:
    """A product of one shape. Its rows are cuBLASLt's columns, so it computes the transposed matrices' product."""

    def __init__(self, library: CublasLt, num_rows: int, weight: torch.Tensor, row_stride: int) -> None:
        self._lt = library
        self._call = library._call
        out_size, in_size = weight.shape
        kind = _DATA_TYPES[weight.dtype]
        self._weight = self._layout(kind, in_size, out_size, weight.stride(0))
        self._inputs = self._layout(kind, in_size, num_rows, row_stride)
        self._outputs = self._layout(kind, out_size, num_rows, out_size)
        self._operation = ctypes.c_void_p()
        self._call("cublasLtMatmulDescCreate", ctypes.byref(self._operation), _CUBLAS_COMPUTE_32F, _CUDA_R_32F)
        transposed = ctypes.c_int(_OP_T)
        self._call(
            "cublasLtMatmulDescSetAttribute",
            self._operation,
            _MATMUL_DESC_TRANSA,
            ctypes.byref(transposed),
            ctypes.c_size_t(ctypes.sizeof(transposed)),
        )

    def algorithms(self, max_count: int, *, workspace_bytes: int = WORKSPACE_BYTES) -> list[Algorithm]:
        """Return at most `max_count` ways to compute it, the one that the heuristic thinks fastest first."""
        preference = ctypes.c_void_p()
        self._call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        try:
            for attribute, value in (
                (_PREF_MAX_WORKSPACE_BYTES, ctypes.c_uint64(workspace_bytes)),
                (_PREF_REDUCTION_SCHEME_MASK, ctypes.c_uint32(_ORDERED_REDUCTIONS)),
            ):
                self._call(
                    "cublasLtMatmulPreferenceSetAttribute",
                    preference,
                    attribute,
                    ctypes.byref(value),
                    ctypes.c_size_t(ctypes.sizeof(value)),
                )
            results = (_HeuristicResult * max_count)()
            count = ctypes.c_int()
            self._call(
                "cublasLtMatmulAlgoGetHeuristic",
                self._lt._handle,
                self._operation,
                self._weight,
                self._inputs,
                self._outputs,
                self._outputs,
                preference,
                max_count,
                results,
                ctypes.byref(count),
            )
        finally:
            self._call("cublasLtMatmulPreferenceDestroy", preference)
        return [Algorithm(results[i]) for i in range(count.value) if results[i].state == 0]

    def run(
        self, algorithm: Algorithm, inputs: torch.Tensor, weight: torch.Tensor, outputs: torch.Tensor
    ) -> None:
        """Enqueue the product into `outputs`, ``[num_rows, out]``, on the current stream."""
        stream = torch.cuda.current_stream(inputs.device).cuda_stream
        self._call(
            "cublasLtMatmul",
            self._lt._handle,
            self._operation,
            ctypes.byref(self._lt._one),
            ctypes.c_void_p(weight.data_ptr()),
            self._weight,
            ctypes.c_void_p(inputs.data_ptr()),
            self._inputs,
            ctypes.byref(self._lt._zero),
            ctypes.c_void_p(outputs.data_ptr()),
            self._outputs,
            ctypes.c_void_p(outputs.data_ptr()),
            self._outputs,
            ctypes.byref(algorithm.result.algo),
            ctypes.c_void_p(self._lt._workspace.data_ptr()),
            ctypes.c_size_t(WORKSPACE_BYTES),
            ctypes.c_void_p(stream),
        )

    def _layout(self, kind: int, num_rows: int, num_columns: int, stride: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        self._call(
            "cublasLtMatrixLayoutCreate",
            ctypes.byref(layout),
            kind,
            ctypes.c_uint64(num_rows),
            ctypes.c_uint64(num_columns),
            ctypes.c_int64(stride),
        )
        return layout
