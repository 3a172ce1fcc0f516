"""Cached KV in a real service: conversations have the same tokens with it, and it is seen what it saves."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any, NamedTuple

import httpx
import pytest

from tests.support.data import shared_file
from tests.support.reference import TIE_LOGITS
from tests.support.service import Service

NUM_CONVERSATIONS = 6
NEW_TOKENS = 16
BLOCK_TOKENS = 64


class Turn(NamedTuple):
    """One turn of a conversation as the service answered it."""

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]
    """At each token, how far its logprob is above the next best."""
    num_cached: int


@pytest.fixture(scope="module")
def conversations() -> list[list[str]]:
    """The two turns of some MT-bench questions."""
    lines = shared_file("data", "mt_bench_question.jsonl").read_text().splitlines()
    return [json.loads(line)["turns"] for line in lines[:: len(lines) // NUM_CONVERSATIONS]][
        :NUM_CONVERSATIONS
    ]


async def complete(
    client: httpx.AsyncClient, service: Service, prompt: list[int], salt: str, max_tokens: int = NEW_TOKENS
) -> Turn:
    body = {
        "model": service.model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": 2,
        "return_token_ids": True,
        "cache_salt": salt,
    }
    answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
    (choice,) = answer["choices"]
    best = [sorted(top.values(), reverse=True) for top in choice["logprobs"]["top_logprobs"]]
    return Turn(
        prompt=prompt,
        tokens=choice["token_ids"],
        gaps=[values[0] - values[1] for values in best],
        num_cached=answer["usage"]["prompt_tokens_details"]["cached_tokens"],
    )


async def tokenize(client: httpx.AsyncClient, text: str) -> list[int]:
    answer = (await client.post("/tokenize", json={"prompt": text})).raise_for_status().json()
    tokens: list[int] = answer["tokens"]
    return tokens


def same_but_for_ties(expected: Turn, got: Turn) -> bool:
    """Whether two answers are the same, or part where two tokens were as likely."""
    for i, (one, other) in enumerate(zip(expected.tokens, got.tokens, strict=False)):
        if one != other:
            return expected.gaps[i] < TIE_LOGITS
    return len(expected.tokens) == len(got.tokens)


def test_conversations_have_the_same_tokens_as_without_a_cache(
    service: Service, conversations: list[list[str]]
) -> None:
    """Every second turn finds its first one cached. What it is compared with has a salt of its own."""
    salt = uuid.uuid4().hex
    instruction = (
        "You are a helpful assistant. Answer as briefly as you can, and say so if you do not know. " * 13
    )

    async def converse(client: httpx.AsyncClient, texts: list[str]) -> list[tuple[Turn, Turn]]:
        history: list[int] = []
        turns = []
        for text in (instruction + texts[0], texts[1]):
            history = [*history, *await tokenize(client, text)]
            cached = await complete(client, service, history, salt)
            turns.append((await complete(client, service, history, uuid.uuid4().hex), cached))
            history = [*history, *cached.tokens]
        return turns

    async def run() -> list[list[tuple[Turn, Turn]]]:
        async with httpx.AsyncClient(base_url=service.url, timeout=300) as client:
            return list(await asyncio.gather(*(converse(client, texts) for texts in conversations)))

    hits = service.metric("purefill_prefix_cache_hit_tokens_total")
    queries = service.metric("purefill_prefix_cache_query_tokens_total")
    answers = asyncio.run(run())
    turns = [turn for conversation in answers for turn in conversation]
    assert all(same_but_for_ties(plain, cached) for plain, cached in turns)
    assert not any(plain.num_cached for plain, _ in turns)
    for (_, first), (_, second) in answers:
        # The answer's newest token has no KV.
        assert second.num_cached >= (len(first.prompt) + len(first.tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    found = [first.num_cached for (_, first), _ in answers]
    assert sorted(found)[0] == 0 < sorted(found)[1], (
        "the instruction is computed once, though all come at once"
    )
    assert service.metric("purefill_prefix_cache_query_tokens_total") - queries == 2 * sum(
        len(cached.prompt) for _, cached in turns
    )
    assert service.metric("purefill_prefix_cache_hit_tokens_total") - hits == sum(
        cached.num_cached for _, cached in turns
    )


def test_a_reset_forgets_what_was_cached(service: Service) -> None:
    prompt, salt = list(range(100, 300)), uuid.uuid4().hex

    async def run() -> list[int]:
        async with httpx.AsyncClient(base_url=service.url, timeout=300) as client:
            cached = [(await complete(client, service, prompt, salt, 1)).num_cached for _ in range(2)]
            reset: dict[str, Any] = (await client.post("/reset_prefix_cache")).raise_for_status().json()
            assert reset["num_blocks"] >= 3
            return [*cached, (await complete(client, service, prompt, salt, 1)).num_cached]

    assert asyncio.run(run()) == [0, 3 * BLOCK_TOKENS, 0]
    assert service.metric("purefill_prefix_cache_pages") > 0
