"""A live request, as the scheduler knows it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

from scheduler.actions import RequeueReason
from scheduler.messages import Lease, Request, SequenceRef
from scheduler.prefix.hashing import BlockChain


class RequestState(enum.Enum):
    """Where a live request is. One that has ended is in the scheduler no more."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"


@dataclass(slots=True, kw_only=True)
class LiveRequest:
    """Owns what is known of one request that has not ended."""

    request: Request
    """With the tokens that it had when it was last queued."""
    arrival_time: float
    queued_at: float
    """When it was last put into the queue."""
    age: int
    """Smaller is older."""
    state: RequestState = RequestState.WAITING
    lease: Lease | None = None
    """With the pages that it started with."""
    output_token_ids: list[int] = field(default_factory=list)
    """All tokens that it has, as far as the workers have reported them."""
    cancelled: bool = False
    """It ends when its prefill is back."""
    requeue_reason: RequeueReason | None = None
    """Why it waits again as soon as its pages are back, if it does."""
    num_losses: int = 0
    """Workers in a row that died while they computed it."""
    is_alone: bool = False
    """It is prefilled alone, and no other such request is computed meanwhile: it may be what kills workers."""
    num_failed_handoffs: int = 0
    """Times that its pages did not reach their decode worker."""
    resume_at: int | None = None
    """How many of its tokens it keeps when it waits again; None: all."""
    chain: BlockChain | None = None
    """The digests of its blocks of tokens; None if they are not to be cached."""
    num_usable_blocks: int = 0
    """How many of them may come from the cache, as of when it was last queued."""
    _ref: SequenceRef | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that it has, prompt and output."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    @property
    def ref(self) -> SequenceRef:
        """What the decode worker knows it by, while it has a lease."""
        assert self.lease is not None
        if self._ref is None or self._ref.epoch != self.lease.epoch:
            self._ref = SequenceRef(request_id=self.request.request_id, epoch=self.lease.epoch)
        return self._ref

    def holds(self, epoch: int) -> bool:
        """Whether it has the lease of this epoch."""
        return self.lease is not None and self.lease.epoch == epoch

    def count_usable_blocks(self) -> None:
        """See how many of its first blocks may come from the cache: at least its last token must be computed."""
        self.num_usable_blocks = 0
        if self.chain is not None and not self.request.reports_prompt:
            self.num_usable_blocks = self.chain.num_blocks(self.request.num_prefill_tokens - 1)

    def wait_again(self) -> None:
        """Go back to the start, with the tokens that it has, or with as many as it is to keep."""
        if self.resume_at is not None:
            del self.output_token_ids[self.resume_at :]
            self.resume_at = None
            if self.chain is not None:
                self.chain.cut(self.num_tokens)
        self.request = replace(self.request, output_token_ids=tuple(self.output_token_ids))
        self.state = RequestState.WAITING
        self.lease = None
        self.requeue_reason = None
