"""What the scheduler's core wants done, and whom it tells of what happens."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal, Protocol

from scheduler.batching.former import FormedBatch
from scheduler.messages import (
    DecodeStart,
    DecodeWorkerInfo,
    HandoffResult,
    PageGrant,
    PrefillBatch,
    PrefillResult,
    PrefillWorkerInfo,
    Request,
    SequenceRef,
    StepReport,
    TokenEvent,
    TokenEvents,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPrefill:
    """Action: send a batch to a prefill worker."""

    worker: str
    batch: PrefillBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class SendDecodeStarts:
    """Action: let a decode worker go on with prefilled sequences."""

    worker: str
    starts: tuple[DecodeStart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendDecodeGrow:
    """Action: give a decode worker's sequences more pages."""

    worker: str
    grants: tuple[PageGrant, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendDecodeCancel:
    """Action: let a decode worker drop sequences."""

    worker: str
    refs: tuple[SequenceRef, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendEvents:
    """Action: tell an ApiServer what became of its requests."""

    api_server: str
    events: TokenEvents


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseWorker:
    """Action: end a worker that was to leave. Nothing is left at it, and the scheduler has forgotten it."""

    worker: str


Action = SendPrefill | SendDecodeStarts | SendDecodeGrow | SendDecodeCancel | SendEvents | ReleaseWorker

RequeueReason = Literal["preempted", "stale_lease", "worker_lost", "handoff_failed", "drained", "resumed"]
"""Why a request waits again that was prefilling or decoding."""


class Observer(Protocol):
    """Told of what happens, for metrics and logs. All times are in seconds."""

    def joined(self, info: PrefillWorkerInfo | DecodeWorkerInfo) -> None:
        """A worker is ready, for the first time or again."""

    def batch_formed(self, batch: PrefillBatch, worker: str, formed: FormedBatch) -> None:
        """A batch leaves for a prefill worker."""

    def prefilled(self, result: PrefillResult) -> None:
        """A batch came back."""

    def handed_off(self, handoff: HandoffResult) -> None:
        """The pages of a batch have arrived at their decode worker, or not."""

    def stepped(self, report: StepReport) -> None:
        """A decode worker made a step."""

    def requeued(self, reason: RequeueReason) -> None:
        """A request waits again, with the tokens that it has."""

    def refused(self, what: str) -> None:
        """Something came under a lease that had ended: a ``write``, a ``read``, or a report (``event``)."""

    def ended(self, request: Request, outcome: str, num_outputs: int, seconds: float) -> None:
        """A request ended: ``stop``, ``length``, ``cancelled``, or the label of an error."""


@dataclass(slots=True)
class Outbox:
    """Actions not yet taken, with those for one receiver merged into one message."""

    prefills: list[SendPrefill] = field(default_factory=list)
    starts: defaultdict[str, list[DecodeStart]] = field(default_factory=lambda: defaultdict(list))
    grows: defaultdict[str, list[PageGrant]] = field(default_factory=lambda: defaultdict(list))
    cancels: defaultdict[str, list[SequenceRef]] = field(default_factory=lambda: defaultdict(list))
    events: defaultdict[str, list[TokenEvent]] = field(default_factory=lambda: defaultdict(list))

    leavers: list[ReleaseWorker] = field(default_factory=list)

    def take(self) -> list[Action]:
        """Return all actions and forget them."""
        actions: list[Action] = [*self.prefills]
        if self.starts:
            actions += [SendDecodeStarts(worker=w, starts=tuple(s)) for w, s in self.starts.items()]
        if self.grows:
            actions += [SendDecodeGrow(worker=w, grants=tuple(g)) for w, g in self.grows.items()]
        if self.cancels:
            actions += [SendDecodeCancel(worker=w, refs=tuple(r)) for w, r in self.cancels.items()]
        if self.events:
            actions += [
                SendEvents(api_server=a, events=TokenEvents(source="scheduler", events=tuple(e)))
                for a, e in self.events.items()
            ]
        actions += self.leavers
        if actions:  # Most reports of a decode worker have no consequence.
            for part in (self.prefills, self.starts, self.grows, self.cancels, self.events, self.leavers):
                part.clear()
        return actions
