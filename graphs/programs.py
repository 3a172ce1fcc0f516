"""A computation bound to the static buffers of one bucket: a CUDA graph, or the same computation on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from graphs.buckets import Bucket
from graphs.capture import CapturedGraph, GraphMemory
from graphs.layout import BatchInputs, BatchLayout, HostBatch, SlotInput
from graphs.shaping import ShapingBuffers


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What is said of the numbers of those batches in which a slot is `reported`."""

    width: int
    """Words per slot."""
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Makes int32 ``[S, width]`` of the rows and of the numbers ``[S]``. It has a small graph of its own."""


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
    report: Report | None = None


class Ticket(Protocol):
    """A batch on its way."""

    @property
    def bucket(self) -> Bucket:
        """The bucket it runs in."""

    def result(self) -> list[int]:
        """Wait for the batch; return one number for each of its sequences."""

    def report(self) -> NDArray[np.int32]:
        """Wait for the batch; return its report, ``[sequences, width]``, or no rows if no slot is `reported`."""


Announce = Callable[[Bucket, str, torch.Tensor], None]
"""Told of a batch once it is packed: its bucket, the finish that it needs, and its words, int32."""


class Program(Protocol):
    """A computation on the buffers of one bucket."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its buffers, and of its graphs on the device."""

    def submit(self, slots: Sequence[SlotInput], announce: Announce | None = None) -> Ticket:
        """Start a batch. Where there is a device, it runs after those submitted before."""

    def follow(self, finish: str, words: torch.Tensor) -> None:
        """Start a batch that another process has packed, without shapings and reports."""


NO_REPORT: NDArray[np.int32] = np.empty((0, 0), np.int32)
_REPORT = "report"
"""Name of the report's graph among those of the finishes."""


@dataclass(frozen=True, slots=True)
class _Done:
    bucket: Bucket
    numbers: list[int]
    details: NDArray[np.int32]

    def result(self) -> list[int]:
        return self.numbers

    def report(self) -> NDArray[np.int32]:
        return self.details


class HostProgram:
    """Runs the computation on the CPU when a batch is submitted. The host buffer is the static input itself."""

    def __init__(
        self,
        computation: Computation,
        layout: BatchLayout,
        output: torch.Tensor,
        shaping: ShapingBuffers | None = None,
    ) -> None:
        """`output` is where the numbers are left, ``[slots]`` int64."""
        self._computation = computation
        self._output = output
        self._host = HostBatch(layout)
        self._shaping = shaping
        views = None if shaping is None else shaping.inputs(layout.bucket.num_slots)
        self._inputs = BatchInputs.of(layout, self._host.tensor, views)

    @property
    def size_bytes(self) -> int:
        """Bytes of the static buffer."""
        return self._host.layout.size_bytes

    @torch.inference_mode()
    def submit(self, slots: Sequence[SlotInput], announce: Announce | None = None) -> Ticket:
        """Compute a batch."""
        count, computation = len(slots), self._computation
        self._host.pack(slots)
        _upload_shapings(self._shaping, slots, self._host.layout)
        finish = computation.choose_finish(slots)
        if announce is not None:
            announce(self._host.layout.bucket, finish, self._host.tensor)
        rows, numbers = self._compute(finish), self._output
        details = NO_REPORT
        if computation.report is not None and any(slot.reported for slot in slots):
            details = computation.report.compute(rows, numbers)[:count].numpy()
        return _Done(self._host.layout.bucket, numbers[:count].tolist(), details)

    def follow(self, finish: str, words: torch.Tensor) -> None:
        """Compute a batch that another process has packed."""
        self._host.tensor.copy_(words)
        self._compute(finish)

    def _compute(self, finish: str) -> torch.Tensor:
        rows = self._computation.forward(self._inputs)
        self._output.copy_(self._computation.finishes[finish](rows, self._inputs))
        return rows


def _upload_shapings(buffers: ShapingBuffers | None, slots: Sequence[SlotInput], layout: BatchLayout) -> None:
    shapings = [slot.shaping for slot in slots]
    if buffers is not None and any(shapings):
        with torch.inference_mode():
            buffers.upload(shapings, layout.bucket.num_slots)


class CudaProgram:
    """Runs the computation on a CUDA device: one launch a batch, of a graph that begins with the copy of its input
    from the host and ends with the copy of its numbers to it.

    It has two host buffers, so that the next batch is packed and enqueued while one runs; each has its own graphs.
    Shapings and reports, in batches that have them, are copies and a launch more.
    """

    def __init__(
        self,
        computation: Computation,
        layout: BatchLayout,
        output: torch.Tensor,
        shaping: ShapingBuffers | None = None,
    ) -> None:
        """`output` is where the numbers are left, ``[slots]`` int64, on the device."""
        device = output.device
        self._computation = computation
        self._layout = layout
        self._shaping = shaping
        num_slots = layout.bucket.num_slots
        self._buffer = torch.zeros(layout.num_words, dtype=torch.int32, device=device)
        views = None if shaping is None else shaping.inputs(num_slots)
        self._inputs = BatchInputs.of(layout, self._buffer, views)
        self._output = output
        width = 0 if computation.report is None else computation.report.width
        self._stages = (_Stage(layout, width), _Stage(layout, width))
        self._first_finish = next(iter(computation.finishes))

    def capture(self, memory: GraphMemory) -> None:
        """Capture the graphs. Until then a submitted batch runs without."""
        for stage in self._stages:
            stage.graphs = self._capture(stage, memory)

    def _capture(self, stage: _Stage, memory: GraphMemory) -> dict[str, CapturedGraph]:
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
        if self._computation.report is not None:
            graphs[_REPORT] = memory.capture(lambda: self._report(rows, stage))
        return graphs

    @property
    def size_bytes(self) -> int:
        """Device bytes of graphs and static buffers."""
        graphs = [graph for stage in self._stages for graph in stage.graphs.values()]
        return self._layout.size_bytes + self._output.nbytes + sum(graph.size_bytes for graph in graphs)

    def submit(self, slots: Sequence[SlotInput], announce: Announce | None = None) -> Ticket:
        """Enqueue a batch on the current stream and return at once, unless two are under way already."""
        stage = self._next_stage()
        stage.host.pack(slots)
        _upload_shapings(self._shaping, slots, self._layout)
        finish = self._computation.choose_finish(slots)
        if announce is not None:
            announce(self._layout.bucket, finish, stage.host.tensor)
        reported = any(slot.reported for slot in slots)
        self._launch(stage, finish, reported)
        return stage.hold(len(slots), reported=reported)

    def follow(self, finish: str, words: torch.Tensor) -> None:
        """Enqueue a batch that another process has packed."""
        stage = self._next_stage()
        stage.host.tensor.copy_(words)
        self._launch(stage, finish, reported=False)
        stage.hold(0, reported=False)

    def _next_stage(self) -> _Stage:
        """Return the stage that was used longer ago; wait until its batch is done."""
        stage = self._stages[0]
        self._stages = (self._stages[1], stage)
        stage.free()
        return stage

    def _launch(self, stage: _Stage, finish: str, reported: bool) -> None:
        if stage.graphs:
            stage.graphs[self._first_finish].replay()
            if finish != self._first_finish:
                stage.graphs[finish].replay()
            if reported:
                stage.graphs[_REPORT].replay()
        else:
            with torch.inference_mode():  # It costs what a replay should not.
                rows = self._forward(stage)
                self._finish(finish, rows, stage)
                if reported:
                    self._report(rows, stage)

    def _forward(self, stage: _Stage) -> torch.Tensor:
        self._buffer.copy_(stage.host.tensor, non_blocking=True)
        return self._computation.forward(self._inputs)

    def _finish(self, name: str, rows: torch.Tensor, stage: _Stage) -> None:
        self._output.copy_(self._computation.finishes[name](rows, self._inputs))
        stage.numbers.copy_(self._output, non_blocking=True)

    def _report(self, rows: torch.Tensor, stage: _Stage) -> None:
        assert self._computation.report is not None
        stage.details.copy_(self._computation.report.compute(rows, self._output), non_blocking=True)


class _Stage:
    """The pinned host memory of one batch under way, its input and its result, and the graphs that use it."""

    def __init__(self, layout: BatchLayout, report_width: int) -> None:
        num_slots = layout.bucket.num_slots
        self.host = HostBatch(layout, pinned=True)
        self.numbers = torch.zeros(num_slots, dtype=torch.int64, pin_memory=True)
        self.details = torch.zeros((num_slots, report_width), dtype=torch.int32, pin_memory=True)
        self.graphs: dict[str, CapturedGraph] = {}
        self._done = torch.cuda.Event()
        self._ticket: _CudaTicket | None = None

    def hold(self, count: int, *, reported: bool) -> _CudaTicket:
        """Return the ticket of a batch of `count` sequences that was just enqueued."""
        self._done.record()
        self._ticket = _CudaTicket(self, count, reported=reported)
        return self._ticket

    def take(self, count: int, *, reported: bool) -> tuple[list[int], NDArray[np.int32]]:
        """Wait for the batch; return its result and report. The memory may be used for the next one then."""
        self._done.synchronize()
        self._ticket = None
        return self.numbers[:count].tolist(), self.details[:count].numpy().copy() if reported else NO_REPORT

    def free(self) -> None:
        """Wait for the batch that still uses this memory, if there is one. Its ticket keeps the result."""
        ticket = self._ticket
        if ticket is not None:
            ticket.result()


class _CudaTicket:
    """A batch's result, which one thread may take while another needs its memory for the next batch."""

    def __init__(self, stage: _Stage, count: int, *, reported: bool) -> None:
        self._lock = threading.Lock()
        self._stage = stage
        self._count = count
        self._reported = reported
        self._taken: tuple[list[int], NDArray[np.int32]] | None = None

    @property
    def bucket(self) -> Bucket:
        return self._stage.host.layout.bucket

    def result(self) -> list[int]:
        return self._take()[0]

    def report(self) -> NDArray[np.int32]:
        return self._take()[1]

    def _take(self) -> tuple[list[int], NDArray[np.int32]]:
        with self._lock:
            if self._taken is None:
                self._taken = self._stage.take(self._count, reported=self._reported)
            return self._taken
