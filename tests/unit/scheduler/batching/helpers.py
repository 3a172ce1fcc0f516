"""What the tests of the batch former share."""

from graphs.buckets import default_token_ladder
from scheduler.batching.cost_model import CostModel
from scheduler.batching.requests import QueuedRequest

# Qwen3-8B on one H200, merged weights and full graph: seconds of a batch by its tokens.
H200 = {128: 0.0056, 256: 0.0077, 512: 0.0127, 1024: 0.024, 4096: 0.0971, 8192: 0.2005}


def h200_model(max_tokens: int = 4096) -> CostModel:
    return CostModel.interpolated(default_token_ladder(max_tokens), H200)


def queued(
    request_id: str,
    num_tokens: int = 64,
    *,
    at: float = 0.0,
    pages: int = 1,
    priority: int = 0,
    deadline: float | None = None,
    tenant: str = "",
) -> QueuedRequest:
    return QueuedRequest(
        request_id=request_id,
        num_tokens=num_tokens,
        num_pages=pages,
        arrival_time=at,
        priority=priority,
        deadline=deadline,
        tenant=tenant,
    )
