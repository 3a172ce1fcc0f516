"""What was accepted once is accepted again: from a journal, or by a scheduler that starts again."""

from __future__ import annotations

from dataclasses import replace

from scheduler.actions import SendEvents
from scheduler.core import SchedulerCore
from scheduler.errors import InvalidRequestError, UnavailableError
from scheduler.messages import Request, SamplingParams
from tests.unit.scheduler.test_core_machine import (
    LIMITS,
    PAGE_SIZE,
    POOL_PAGES,
    Ends,
    decode_info,
    make_core,
    prefill_info,
)


def test_a_request_does_not_outgrow_the_queue() -> None:
    core = make_core(Ends())
    core.add_prefill_worker(prefill_info("prefill-0"))
    core.add_decode_worker(decode_info("decode-0"))
    group = [
        Request(
            request_id=f"{choice}",
            api_server="api-0",
            prompt_token_ids=(1,) * (LIMITS.max_tokens // 4),
            sampling=SamplingParams(max_tokens=12),
        )
        for choice in range(4)
    ]
    assert core.submit(group, 0.0) is None
    core.cancel_all_of("api-0", 0.0)
    grown = [replace(request, output_token_ids=(1,) * 5) for request in group]
    assert core.submit(grown, 1.0) is None
    core.cancel_all_of("api-0", 1.0)
    # Prompts that alone are too much are refused as ever.
    longer = [replace(request, prompt_token_ids=(*request.prompt_token_ids, 1)) for request in group]
    rejection = core.submit(longer, 2.0)
    assert rejection is not None
    assert (rejection.label, rejection.param) == (InvalidRequestError.label, "prompt")


def resumed(core: SchedulerCore) -> list[str | None]:
    """Have a core take in a request that only fits a large pool; return the labels of the errors that are sent."""
    prompt = (1,) * (PAGE_SIZE * POOL_PAGES["decode-1"])
    request = Request(
        request_id="long", api_server="api-0", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=8)
    )
    core.resume([request], 0.0)
    return errors(core)


def errors(core: SchedulerCore) -> list[str | None]:
    sent = [action for action in core.tick(1.0) if isinstance(action, SendEvents)]
    return [event.error_label for action in sent for event in action.events.events]


def test_what_fits_a_pool_that_is_still_to_be_taken_over_waits_for_it() -> None:
    core = make_core(Ends())
    for name in ("decode-0", "decode-1"):
        core.expect_decode_worker(name)
    core.add_prefill_worker(prefill_info("prefill-0"))
    core.add_decode_worker(decode_info("decode-1"))
    core.fail_what_fits_nowhere(0.0)
    assert (resumed(core), core.num_waiting) == ([], 1)
    core.add_decode_worker(decode_info("decode-0"))
    core.fail_what_fits_nowhere(1.0)
    assert (errors(core), core.num_live) == ([], 1)


def test_what_fits_no_pool_that_was_taken_over_fails() -> None:
    core = make_core(Ends())
    for name in ("decode-0", "decode-1"):
        core.expect_decode_worker(name)
    core.add_prefill_worker(prefill_info("prefill-0"))
    core.add_decode_worker(decode_info("decode-1"))
    assert resumed(core) == []
    core.worker_gone("decode-0", 1.0)
    assert (errors(core), core.num_live) == ([UnavailableError.label], 0)


def test_what_no_decode_worker_is_left_for_fails() -> None:
    core = make_core(Ends())
    core.add_prefill_worker(prefill_info("prefill-0"))
    assert (resumed(core), core.num_live) == ([UnavailableError.label], 0)
