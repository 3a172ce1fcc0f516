"""CUDA graphs of plain functions. Knows no model."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import torch


class CapturedGraph:
    """A captured function. `replay` computes it again on whatever its input tensors hold then."""

    def __init__(self, graph: torch.cuda.CUDAGraph, *, size_bytes: int, seconds: float) -> None:
        self._graph = graph
        self.size_bytes = size_bytes
        """Device memory that it took; little where earlier graphs' memory was enough."""
        self.seconds = seconds
        """Time to warm up and capture."""

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()


class GraphMemory:
    """The memory that all graphs of one device share, since only one of them runs at a time.

    Capture the largest first: later ones then find their memory in it. What a function allocates while it is
    captured, and drops, may be overwritten by any other graph's replay.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, function: Callable[[], None]) -> CapturedGraph:
        """Run `function` once to warm it up, then capture it.

        Raises `torch.OutOfMemoryError` if the memory does not suffice; the graphs captured before stay good.
        """
        started = time.perf_counter()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # Compiles, tunes, and makes what is made only once.
            function()
            self._stream.synchronize()
            # What the allocator keeps for eager work is no use to the graphs.
            torch.cuda.empty_cache()
            free_before = torch.cuda.mem_get_info(self._device)[0]
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                function()
            except BaseException:
                with suppress(RuntimeError):  # The error at hand says more than "capture was invalidated".
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        size_bytes = free_before - torch.cuda.mem_get_info(self._device)[0]
        return CapturedGraph(graph, size_bytes=max(size_bytes, 0), seconds=time.perf_counter() - started)
