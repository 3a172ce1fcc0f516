"""Who is told what happens in a simulation: the core's observer, and the decode workers' sink."""

from __future__ import annotations

from scheduler.actions import RequeueReason
from scheduler.batching.former import FormedBatch
from scheduler.messages import (
    DecodeWorkerInfo,
    HandoffResult,
    PrefillBatch,
    PrefillResult,
    PrefillWorkerInfo,
    Request,
    StepReport,
)
from scheduler.simulate.collector import Collector, RequestTimes


class Watcher:
    """The core's observer, and the decode workers' sink: owns the times of the requests that live."""

    def __init__(self, collector: Collector, out_s: float) -> None:
        """`out_s`: from a worker to the client."""
        self.live: dict[str, RequestTimes] = {}
        self.token_at = 0.0
        """When clients have the tokens that are being reported."""
        self.steps = collector.steps
        """See `DecodeSink`."""
        self._collector = collector
        self._out_s = out_s

    def prefill_token(self, request_id: str) -> None:
        """A prefill gave a request a token."""
        at = self.token_at
        times = self.live[request_id]
        if times.first_token_s is None:
            times.first_token_s = at
        else:
            self._collector.gap(at - times.last_token_s)
        times.last_token_s = at

    def took_up(self, request_id: str, second_token_at: float) -> None:
        """See `DecodeSink`."""
        times = self.live.get(request_id)
        if times is not None:
            at = second_token_at + self._out_s
            self._collector.gap(max(0.0, at - times.last_token_s))
            times.last_token_s = at

    def left(self, request_id: str, last_token_at: float) -> None:
        """See `DecodeSink`."""
        times = self.live.get(request_id)
        if times is not None:
            times.last_token_s = last_token_at + self._out_s

    def batch_formed(self, batch: PrefillBatch, worker: str, formed: FormedBatch) -> None:
        """See `Observer`."""
        self._collector.batch(len(formed.requests), formed.reason)
        for queued in formed.requests:
            self._collector.queued.add(formed.formed_at - queued.arrival_time)

    def ended(self, request: Request, outcome: str, num_outputs: int, seconds: float) -> None:
        """See `Observer`."""
        times = self.live.pop(request.request_id)
        times.outcome = outcome
        times.last_token_s = max(times.last_token_s, self.token_at)
        self._collector.ended(times)

    def requeued(self, reason: RequeueReason) -> None:
        """See `Observer`."""
        self._collector.requeues[reason] += 1

    def joined(self, info: PrefillWorkerInfo | DecodeWorkerInfo) -> None:
        """The engine let it join."""

    def prefilled(self, result: PrefillResult) -> None:
        """The engine tells the collector itself."""

    def handed_off(self, handoff: HandoffResult) -> None:
        """No pages travel."""

    def stepped(self, report: StepReport) -> None:
        """The decode workers tell the collector of each step."""

    def refused(self, what: str) -> None:
        """What comes of it is counted as `requeued`."""
