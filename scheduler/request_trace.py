"""The trace that a service can write of its own requests: when each came and how long it was; no text, no names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO

from scheduler.messages import Request
from scheduler.metrics import SchedulerMetrics
from scheduler.simulate.calibrate import USER as CALIBRATION_USER
from scheduler.simulate.traces import TRACE_COLUMNS


class RequestTrace:
    """Owns a file with a row for each request, in the order in which they came.

    A row is written once its request and all before it have ended, so what runs when the process dies is missing.
    """

    def __init__(self, file: IO[str]) -> None:
        """`file` is open for appending."""
        self._file = file
        if not file.tell():
            self._write(TRACE_COLUMNS)
        self._last_time_s = 0.0
        self._times: dict[str, float] = {}
        """When each request came that has no row yet, first come first."""
        self._lengths: dict[str, tuple[int, int]] = {}
        """Of those that have ended."""

    def accepted(self, requests: Iterable[Request], time_s: float) -> None:
        """Requests came, at a time of day. Those that are known already, or are the service's own, are passed over."""
        # Clocks are set back at times; a trace never goes back.
        self._last_time_s = max(self._last_time_s, time_s)
        for request in requests:
            if not request.tenant.endswith(f"/{CALIBRATION_USER}"):
                self._times.setdefault(request.request_id, self._last_time_s)

    def ended(self, request: Request, num_outputs: int) -> None:
        """A request ended with so many tokens. One that was never accepted here is passed over."""
        if request.request_id not in self._times:
            return
        self._lengths[request.request_id] = (len(request.prompt_token_ids), num_outputs)
        while (request_id := next(iter(self._times), None)) in self._lengths:
            assert request_id is not None
            lengths = self._lengths.pop(request_id)
            self._write((f"{self._times.pop(request_id):.6f}", *map(str, lengths)))
        self._file.flush()

    def _write(self, row: Iterable[str]) -> None:
        self._file.write(",".join(row) + "\n")


class TracedMetrics(SchedulerMetrics):
    """Metrics that also tell a trace of each request that ends."""

    def __init__(self, trace: RequestTrace) -> None:
        super().__init__()
        self._trace = trace

    def ended(self, request: Request, outcome: str, num_outputs: int, seconds: float) -> None:
        """See `Observer`."""
        super().ended(request, outcome, num_outputs, seconds)
        self._trace.ended(request, num_outputs)
