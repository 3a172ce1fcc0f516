"""From a body and its prompts to sequences: how long each may be, and how its tokens are chosen."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

from scheduler.api.fields import MAX_BANNED_TOKENS, shorten
from scheduler.api.output import Prompt
from scheduler.api.prompts import GenerationRequest, check_vocabulary
from scheduler.errors import InvalidRequestError
from scheduler.messages import ModelInfo, Request, SamplingParams
from scheduler.prefix.hashing import prefix_of
from scheduler.token_ids import TokenIds


def make_requests(
    body: GenerationRequest,
    prompts: Sequence[Prompt],
    model: ModelInfo,
    api_server: str,
    answer_id: str,
    key_digest: str = "",
    *,
    prefix_cache: bool = True,
) -> list[Request]:
    """Return one request for each choice of each prompt: all choices of the first prompt, then of the
    second...

    `prefix_cache`: whether they may use cached KV, and leave theirs. Raises InvalidRequestError if a token id or a
    length is not one that the model can take.
    """
    requests: list[Request] = []
    check_vocabulary(body.stop_token_ids, model, "stop_token_ids", "stop_token_ids")
    check_vocabulary(tuple(i for i, _ in body.logit_bias), model, "logit_bias", "logit_bias")
    nonce = f"{random.getrandbits(32):08x}"  # A client may use its own id twice.
    for i, prompt in enumerate(prompts):
        where = f"prompt {i}" if len(prompts) > 1 else "prompt"
        max_tokens = _max_tokens(body, len(prompt.token_ids), model, where)
        token_ids = TokenIds(prompt.token_ids)
        prefix = b""
        if prefix_cache:
            prefix = prefix_of(token_ids, model=model.name, cache_salt=body.cache_salt or "")
        for choice in range(body.n):
            requests.append(
                Request(
                    request_id=f"{answer_id}-{nonce}-{len(requests)}",
                    api_server=api_server,
                    prompt_token_ids=token_ids,
                    sampling=_sampling(body, choice, max_tokens, model),
                    priority=body.priority,
                    ttft_slo_s=None if body.ttft_slo_ms is None else body.ttft_slo_ms / 1000,
                    tenant=f"{key_digest}/{body.user}",
                    completion_id=answer_id,
                    prefix=prefix,
                )
            )
    return requests


def choice_seed(seed: int | None, choice: int) -> int:
    """Return the seed, 0 <= seed < 2**63, of the choice with this number among those of one prompt.

    No seed: a random one. Choice 0 has the seed of the request, modulo 2**63; choice i > 0 has the first 8
    bytes of SHA-256 of "seed:i", modulo 2**63, so that the choices of neighbouring seeds have nothing in
    common. The prompts of one request do not enter: each is answered as it would be alone.
    """
    if seed is None:
        return random.getrandbits(63)
    if choice:
        digest = hashlib.sha256(f"{seed}:{choice}".encode()).digest()
        seed = int.from_bytes(digest[:8], "big")
    return seed % 2**63


def _sampling(body: GenerationRequest, choice: int, max_tokens: int, model: ModelInfo) -> SamplingParams:
    stop_token_ids = body.stop_token_ids if body.ignore_eos else (*model.eos_token_ids, *body.stop_token_ids)
    stop_token_ids = tuple(dict.fromkeys(stop_token_ids))
    if body.min_tokens and len(stop_token_ids) > MAX_BANNED_TOKENS:
        most = MAX_BANNED_TOKENS - len(set(stop_token_ids) - set(body.stop_token_ids))
        raise InvalidRequestError(
            f"stop_token_ids must hold at most {most} token ids with min_tokens > 0, "
            f"got {len(set(body.stop_token_ids))}",
            param="stop_token_ids",
        )
    wanted = [num for num in (body.num_top_logprobs, body.prompt_logprobs) if num is not None]
    echoes_logprobs = body.wants_echo and body.num_top_logprobs is not None
    return SamplingParams(
        max_tokens=max(max_tokens, 1),
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=min(max(body.top_k, 0), model.vocab_size),
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.logit_bias,
        seed=choice_seed(body.seed, choice),
        stop_token_ids=stop_token_ids,
        num_logprobs=max(wanted, default=None),
        prompt_logprobs=body.prompt_logprobs is not None or echoes_logprobs,
        grammar=body.grammar,
    )


def _max_tokens(body: GenerationRequest, num_prompt_tokens: int, model: ModelInfo, where: str) -> int:
    """Return how many tokens to produce at most."""
    room = model.max_model_len - num_prompt_tokens
    asked = body.asked_max_tokens
    max_tokens = min(body.default_max_tokens, room) if asked is None else asked
    if max_tokens > room:
        raise InvalidRequestError(
            f"{body.max_tokens_param} must be <= {room}, got {shorten(max_tokens)}: {where} has "
            f"{num_prompt_tokens} tokens, and with the completion it must have "
            f"<= {model.max_model_len}, the model's context length",
            param=body.max_tokens_param,
        )
    if body.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens must be <= max_tokens, which is {max_tokens}, got {body.min_tokens}",
            param="min_tokens",
        )
    return max_tokens
