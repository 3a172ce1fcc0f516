"""What is accepted once is accepted again, when a journal hands it over with its tokens so far."""

from __future__ import annotations

from dataclasses import replace

from scheduler.errors import InvalidRequestError
from scheduler.messages import Request, SamplingParams
from tests.unit.scheduler.test_core_machine import LIMITS, Ends, decode_info, make_core, prefill_info


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
