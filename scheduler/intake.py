"""Whether a group of requests can be accepted."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from scheduler.admission import Admission
from scheduler.errors import InvalidRequestError, OverloadedError, UnavailableError
from scheduler.messages import Rejection, Request


def check_group(
    group: Sequence[Request], max_total_tokens: int, live_ids: Collection[str]
) -> Rejection | None:
    """Return why the requests can never run as they are, or None.

    A sequence may have up to `max_total_tokens` tokens, 0 if no worker is ready; no id may be a live request's.
    """
    if not max_total_tokens:
        return Rejection(
            request_id=group[0].request_id, label=UnavailableError.label, message="no worker is ready"
        )
    ids = set[str]()
    for request in group:
        if request.max_total_tokens > max_total_tokens:
            return Rejection(
                request_id=request.request_id,
                label=InvalidRequestError.label,
                param="max_tokens",
                message=f"prompt and max_tokens must be <= {max_total_tokens} tokens together, the size of the "
                f"KV pool, got {request.max_total_tokens}",
            )
        if request.request_id in live_ids or request.request_id in ids:
            return Rejection(
                request_id=request.request_id,
                label=InvalidRequestError.label,
                param="request_id",
                message=f"request_id {request.request_id} is in use",
            )
        ids.add(request.request_id)
    return None


def check_room(group: Sequence[Request], admission: Admission, now: float) -> Rejection | None:
    """Return why the queue cannot take the requests now, or None. `admission` knows the queue's state."""
    # The prompts alone: what fitted once fits still when it comes back with the tokens that it got.
    first, num_tokens = group[0].request_id, sum(len(request.prompt_token_ids) for request in group)
    try:
        # They are in the queue, which counts them, as soon as this returns.
        admission.check(len(group), num_tokens, now)
    except OverloadedError as error:
        return Rejection(
            request_id=first, label=error.label, message=error.message, retry_after_s=error.retry_after_s
        )
    except InvalidRequestError as error:
        return Rejection(request_id=first, label=error.label, message=error.message, param=error.param)
    return None
