"""Workers that compute what is cached, since they do not see the pages."""

from __future__ import annotations

import pytest

from scheduler.actions import SendPrefill
from scheduler.core import SchedulerCore
from scheduler.messages import PrefillOutcome, PrefillResult, Request, SamplingParams
from tests.unit.scheduler.test_core_machine import (
    PAGE_SIZE,
    TIMEOUT_S,
    Ends,
    decode_info,
    make_core,
    prefill_info,
    prefix_of,
)

PROMPT = (1,) * (3 * PAGE_SIZE)


def request(name: str) -> Request:
    return Request(
        request_id=name,
        api_server="api-0",
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(max_tokens=1),
        prefix=prefix_of(PROMPT, 0),
    )


def serve(core: SchedulerCore, name: str, now: float, *, num_cached: int) -> int:
    """Let prefill-0 or its successor answer one request, and say that it found so much cached.

    Returns of how many tokens the queue had been with this request.
    """
    assert core.submit([request(name)], now) is None
    num_tokens = core.queue_state(now).num_tokens
    (send,) = [
        action for action in [*core.tick(now), *core.tick(now + TIMEOUT_S)] if isinstance(action, SendPrefill)
    ]
    outcome = PrefillOutcome(
        request_id=name, token_id=1, finish_reason="length", num_cached_tokens=num_cached
    )
    core.prefill_done(
        PrefillResult(
            batch_id=send.batch.batch_id,
            worker=send.worker,
            outcomes=(outcome,),
            num_tokens=1,
            padding_tokens=0,
            replays={},
        ),
        now + TIMEOUT_S,
    )
    core.tick(now + TIMEOUT_S)
    return num_tokens


@pytest.mark.parametrize("leaves", ["dies", "drains"])
def test_cached_tokens_count_again_once_the_worker_that_does_not_see_them_has_left(leaves: str) -> None:
    core = make_core(Ends())
    core.add_prefill_worker(prefill_info("prefill-0"))
    core.add_decode_worker(decode_info("decode-0"))
    assert serve(core, "fills the cache", 1.0, num_cached=0) == len(PROMPT)
    assert serve(core, "is computed again", 2.0, num_cached=0) == PAGE_SIZE
    assert serve(core, "is known to be", 3.0, num_cached=0) == len(PROMPT)
    core.add_prefill_worker(prefill_info("prefill-1"))
    if leaves == "dies":
        core.worker_lost("prefill-0", 4.0)
    else:
        core.drain_worker("prefill-0")
        core.tick(4.0)
    assert serve(core, "is read", 5.0, num_cached=2 * PAGE_SIZE) == PAGE_SIZE
