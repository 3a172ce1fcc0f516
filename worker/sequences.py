"""What prefill and decode both decide about a sequence: when it ends."""

from __future__ import annotations

from scheduler.messages import FinishReason, Request


def finish_reason(request: Request, output_index: int, token_id: int) -> FinishReason | None:
    """Return why the sequence ends with `token_id` as its output number `output_index`, or None if it goes on."""
    sampling = request.sampling
    if token_id in sampling.stop_token_ids and output_index >= sampling.min_tokens:
        return "stop"
    return "length" if output_index + 1 >= sampling.max_tokens else None
