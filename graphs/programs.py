"""A computation bound to the static buffers of one bucket: a CUDA graph, or the same computation on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from graphs.buckets import Bucket
from graphs.capture import CapturedGraph, GraphMemory
from graphs.layout import BatchInputs, BatchLayout, HostBatch, SlotInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """What is computed for a padded batch of S slots."""

    forward: Callable[[BatchInputs], torch.Tensor]
    """Returns one row per slot, ``[S, ...]``."""
    finishes: Mapping[str, Callable[[torch.Tensor, BatchInputs], torch.Tensor]]
    """Ways to make an int64 ``[S]`` of the rows. The first is in the same graph as `forward`, the others each have
    a small graph of their own, which is replayed after it."""
    choose_finish: Callable[[Sequence[SlotInput]], str]
    """Returns which of the finishes a batch needs."""


class Ticket(Protocol):
    """A batch on its way."""

    @property
    def bucket(self) -> Bucket:
        """The bucket it runs in."""

    def result(self) -> list[int]:
        """Wait for the batch; return one number for each of its sequences."""


class Program(Protocol):
    """A computation on the buffers of one bucket."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its buffers, and of its graphs on the device."""

    def submit(self, slots: Sequence[SlotInput]) -> Ticket:
        """Start a batch. Where there is a device, it runs after those submitted before."""


@dataclass(frozen=True, slots=True)
class _Done:
    bucket: Bucket
    numbers: list[int]

    def result(self) -> list[int]:
        return self.numbers


class HostProgram:
    """Runs the computation on the CPU when a batch is submitted. The host buffer is the static input itself."""

    def __init__(self, computation: Computation, layout: BatchLayout) -> None:
        self._computation = computation
        self._host = HostBatch(layout)
        self._inputs = BatchInputs.of(layout, self._host.tensor)

    @property
    def size_bytes(self) -> int:
        """Bytes of the static buffer."""
        return self._host.layout.size_bytes

    def submit(self, slots: Sequence[SlotInput]) -> Ticket:
        """Compute a batch."""
        self._host.pack(slots)
        rows = self._computation.forward(self._inputs)
        finish = self._computation.finishes[self._computation.choose_finish(slots)]
        return _Done(self._host.layout.bucket, finish(rows, self._inputs)[: len(slots)].tolist())


class CudaProgram:
    """Runs the computation on a CUDA device: one launch a batch, of a graph that begins with the copy of its input
    from the host and ends with the copy of its result to it.

    It has two host buffers, so that the next batch is packed and enqueued while one runs; each has its own graphs.
    """

    def __init__(self, computation: Computation, layout: BatchLayout, device: torch.device) -> None:
        self._computation = computation
        self._layout = layout
        self._buffer = torch.zeros(layout.num_words, dtype=torch.int32, device=device)
        self._inputs = BatchInputs.of(layout, self._buffer)
        self._first_finish = next(iter(computation.finishes))
        self._stages = (_Stage(layout), _Stage(layout))

    def capture(self, memory: GraphMemory) -> None:
        """Capture the graphs. Until then a submitted batch runs without."""
        for stage in self._stages:
            self._capture(stage, memory)

    def _capture(self, stage: _Stage, memory: GraphMemory) -> None:
        rows: torch.Tensor

        def run_whole() -> None:
            nonlocal rows
            rows = self._forward(stage)
            self._finish(self._first_finish, rows, stage)

        graphs = {self._first_finish: memory.capture(run_whole)}
        for name in self._computation.finishes:
            if name not in graphs:
                # It reads the rows where the first graph leaves them.
                graphs[name] = memory.capture(lambda name=name: self._finish(name, rows, stage))  # type: ignore[misc]
        stage.graphs = graphs

    @property
    def size_bytes(self) -> int:
        """Device bytes of graphs and static buffers."""
        graphs = [graph for stage in self._stages for graph in stage.graphs.values()]
        return self._layout.size_bytes + sum(graph.size_bytes for graph in graphs)

    def submit(self, slots: Sequence[SlotInput]) -> Ticket:
        """Enqueue a batch on the current stream and return at once, unless two are under way already."""
        stage = self._stages[0]
        self._stages = (self._stages[1], stage)
        stage.free()
        stage.host.pack(slots)
        self._launch(stage, self._computation.choose_finish(slots))
        return stage.hold(len(slots))

    def _launch(self, stage: _Stage, finish: str) -> None:
        if stage.graphs:
            stage.graphs[self._first_finish].replay()
            if finish != self._first_finish:
                stage.graphs[finish].replay()
        else:
            self._finish(finish, self._forward(stage), stage)

    def _forward(self, stage: _Stage) -> torch.Tensor:
        self._buffer.copy_(stage.host.tensor, non_blocking=True)
        return self._computation.forward(self._inputs)

    def _finish(self, name: str, rows: torch.Tensor, stage: _Stage) -> None:
        numbers = self._computation.finishes[name](rows, self._inputs)
        stage.result.copy_(numbers, non_blocking=True)


class _Stage:
    """The pinned host memory of one batch under way, its input and its result, and the graphs that use it."""

    def __init__(self, layout: BatchLayout) -> None:
        self.host = HostBatch(layout, pinned=True)
        self.result = torch.zeros(layout.bucket.num_slots, dtype=torch.int64, pin_memory=True)
        self.graphs: dict[str, CapturedGraph] = {}
        self._numbers = self.result.numpy()
        self._done = torch.cuda.Event()
        self._ticket: _CudaTicket | None = None

    def hold(self, count: int) -> _CudaTicket:
        """Return the ticket of a batch of `count` sequences that was just enqueued."""
        self._done.record()
        self._ticket = _CudaTicket(self, count)
        return self._ticket

    def take(self, count: int) -> list[int]:
        """Wait for the batch; return its result. The memory may be used for the next one then."""
        self._done.synchronize()
        self._ticket = None
        numbers: list[int] = self._numbers[:count].tolist()
        return numbers

    def free(self) -> None:
        """Wait for the batch that still uses this memory, if there is one. Its ticket keeps the result."""
        if self._ticket is not None:
            self._ticket.result()


class _CudaTicket:
    def __init__(self, stage: _Stage, count: int) -> None:
        self._stage = stage
        self._count = count
        self._numbers: list[int] | None = None

    @property
    def bucket(self) -> Bucket:
        return self._stage.host.layout.bucket

    def result(self) -> list[int]:
        if self._numbers is None:
            self._numbers = self._stage.take(self._count)
        return self._numbers
