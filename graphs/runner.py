"""Runs batches in the buckets of a ladder: graph replays, or the same computation on the CPU."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from graphs.buckets import Bucket, Ladder
from graphs.capture import GraphMemory
from graphs.layout import SCRATCH_PAGE, BatchLayout, SlotInput
from graphs.programs import Announce, Computation, CudaProgram, HostProgram, Program, Ticket
from graphs.shaping import ShapingBuffers

_LOG = logging.getLogger(__name__)
_TIMED_BATCHES = {"cuda": 3, "cpu": 1}
"""On the CPU a batch takes long, and there is nothing to warm up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketReport:
    """What preparing one bucket took, and how fast it runs."""

    bucket: Bucket
    prepare_seconds: float
    """Time to warm up and capture."""
    batch_seconds: float
    """Time of a full batch, from host tokens to the result on the host."""
    size_bytes: int
    """Bytes of its static buffers, and of its graphs on a device."""


class GraphRunner:
    """Owns the static buffers and graphs of each bucket.

    On the CPU, and on a CUDA device where `use_graphs` is false, nothing is captured.
    """

    def __init__(
        self,
        computation: Computation,
        ladder: Ladder,
        *,
        pages_per_slot: int,
        page_size: int,
        device: torch.device,
        use_graphs: bool = True,
        shaping: ShapingBuffers | None = None,
        announce: Announce | None = None,
    ) -> None:
        """`shaping`: for computations that read it; made for the most slots that a bucket has.

        `announce` is told of each batch that is submitted, before it is computed.
        """
        self.ladder = ladder
        self._announce = announce
        self._computation = computation
        self._pages_per_slot = pages_per_slot
        self._page_size = page_size
        self._device = device
        self._shaping = shaping
        self._memory = GraphMemory(device) if device.type == "cuda" and use_graphs else None
        self._programs: dict[Bucket, Program] = {}
        max_slots = max(bucket.num_slots for bucket in ladder.buckets)
        self.output = torch.zeros(max_slots, dtype=torch.int64, device=device)
        """Where every batch leaves its numbers, on the device: the next one may read those of the last."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all static buffers and graphs."""
        shared = 0 if self._shaping is None else self._shaping.size_bytes
        return shared + sum(program.size_bytes for program in self._programs.values())

    def prepare(self) -> tuple[BucketReport, ...]:
        """Capture every bucket, largest first, and time it. Must be called once, before batches are submitted.

        If the device's memory does not suffice for a bucket, it and its equals in tokens leave the ladder, with a
        warning. Raises `torch.OutOfMemoryError` if none is left then, or if the ladder must not shrink.
        """
        reports: list[BucketReport] = []
        for bucket in self.ladder.buckets:
            if bucket not in self.ladder.buckets:
                continue
            try:
                reports.append(self._prepare(bucket))
            except torch.OutOfMemoryError as error:
                smaller = self.ladder.below(bucket.num_tokens)
                if smaller is None:
                    raise
                _LOG.warning(
                    "memory does not suffice for the graph of %s tokens x slots: larger batches are split (%s)",
                    bucket,
                    error,
                )
                self.ladder = smaller
                torch.cuda.empty_cache()
        kept = set(self.ladder.buckets)
        self._programs = {bucket: program for bucket, program in self._programs.items() if bucket in kept}
        return tuple(report for report in reports if report.bucket in kept)

    def submit(self, slots: Sequence[SlotInput]) -> Ticket:
        """Start a batch in the smallest bucket that holds it. Raises `ValueError` if none does."""
        bucket = self.ladder.fit(sum(len(slot.token_ids) for slot in slots), len(slots))
        return self._programs[bucket].submit(slots, self._announce)

    def follow(self, bucket: Bucket, finish: str, words: torch.Tensor) -> None:
        """Start a batch that the same runner of another process has announced."""
        self._programs[bucket].follow(finish, words)

    def _prepare(self, bucket: Bucket) -> BucketReport:
        started = time.perf_counter()
        layout = BatchLayout(bucket=bucket, pages_per_slot=self._pages_per_slot, page_size=self._page_size)
        output = self.output[: bucket.num_slots]
        program: Program
        if self._device.type == "cuda":
            program = cuda_program = CudaProgram(self._computation, layout, output, self._shaping)
            if self._memory is not None:
                cuda_program.capture(self._memory)
        else:
            program = HostProgram(self._computation, layout, output, self._shaping)
        self._programs[bucket] = program
        prepared = time.perf_counter()
        batch = _full_batch(layout)
        times = []
        for _ in range(_TIMED_BATCHES[self._device.type]):
            before = time.perf_counter()
            program.submit(batch).result()
            times.append(time.perf_counter() - before)
        return BucketReport(
            bucket=bucket,
            prepare_seconds=prepared - started,
            batch_seconds=median(times),
            size_bytes=program.size_bytes,
        )


def _full_batch(layout: BatchLayout) -> list[SlotInput]:
    """Return a batch that fills a bucket, in the scratch page: no sequence's pages are touched."""
    tokens, slots = layout.bucket.num_tokens, layout.bucket.num_slots
    context = layout.pages_per_slot * layout.page_size
    lengths = [min(tokens // slots + (i < tokens % slots), context) for i in range(slots)]
    return [
        SlotInput(
            token_ids=[0] * length, num_cached=0, page_ids=[SCRATCH_PAGE] * -(-length // layout.page_size)
        )
        for length in lengths
        if length
    ]
