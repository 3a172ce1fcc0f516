"""Digests of blocks: equal where the tokens, all before them, the model and the salt are, and nowhere else."""

from __future__ import annotations

import random

from scheduler.prefix.hashing import BLOCK_TOKENS, DIGEST_BYTES, BlockChain, chain_digests, prefix_of


def blocks(prefix: bytes) -> list[bytes]:
    return BlockChain(prefix, BLOCK_TOKENS).digests


def test_prompts_that_begin_alike_share_the_digests_of_their_first_blocks() -> None:
    rng = random.Random(1)
    shared = [rng.randrange(1000) for _ in range(3 * BLOCK_TOKENS)]
    one, other = [*shared, 1, *shared], [*shared, 2, *shared]
    first, second = (blocks(prefix_of(tokens, model="m", cache_salt="")) for tokens in (one, other))
    assert len(first) == len(second) == 6
    assert first[:3] == second[:3]
    assert not set(first[3:]) & set(second[3:]), "what follows the difference differs, whatever its tokens"


def test_model_and_salt_are_part_of_every_digest() -> None:
    tokens = [1] * BLOCK_TOKENS
    ways = [("m", ""), ("m", "s"), ("m", "t"), ("ms", ""), ("n", "")]
    digests = {prefix_of(tokens, model=model, cache_salt=salt) for model, salt in ways}
    assert len(digests) == len(ways)
    assert len({digest[DIGEST_BYTES:] for digest in digests}) == len(ways)


def test_a_prompt_shorter_than_a_block_has_a_root_only() -> None:
    assert len(prefix_of([1] * (BLOCK_TOKENS - 1), model="m", cache_salt="")) == DIGEST_BYTES


def test_a_chain_that_follows_an_output_has_the_digests_of_the_next_prompt() -> None:
    rng = random.Random(2)
    prompt = tuple(rng.randrange(10) for _ in range(13))
    output = [rng.randrange(10) for _ in range(30)]
    root = b"r" * DIGEST_BYTES
    chain = BlockChain(root + b"".join(chain_digests(root, prompt, 4)), 4)
    assert (len(chain.digests), chain.next_end) == (3, 16)
    for num_tokens in (13, 15, 16, 17, 29, 43):
        chain.follow(prompt, output, num_tokens)
        assert chain.digests == chain_digests(root, (*prompt, *output)[:num_tokens], 4)
        assert chain.next_end == num_tokens // 4 * 4 + 4
    chain.cut(21)
    assert chain.digests == chain_digests(root, (*prompt, *output)[:20], 4)
    assert (chain.num_blocks(21), chain.num_blocks(7)) == (5, 1)
