"""Cached KV from end to end on a tiny model: the scheduler's core, prefill and decode. Tokens never depend on it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from transformers import Qwen3Config

from scheduler.messages import Lease, SamplingParams
from tests.unit.worker.tiny_models import SHAPE, WINDOW, LoadTiny, prompts_of
from tests.unit.worker.tiny_service import BLOCK_TOKENS, MAX_NUM_SEQS, TinyService
from worker.model import Model

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


@pytest.fixture
def model(load_tiny: LoadTiny) -> Model:
    return load_tiny(Qwen3Config(**SHAPE, head_dim=16))[0]


def expected(model: Model, prompt: Sequence[int], sampling: SamplingParams = GREEDY) -> list[int]:
    return TinyService(model, cached=False).answer("r", prompt, sampling)


def test_a_prompt_that_was_served_before_is_computed_from_its_last_block_on(model: Model) -> None:
    (prompt,) = prompts_of(3 * BLOCK_TOKENS + 5)
    service = TinyService(model)
    first = service.answer("first", prompt, GREEDY)
    assert service.num_computed == len(prompt)
    assert service.answer("second", prompt, GREEDY) == first == expected(model, prompt)
    assert service.num_cached == {"first": 0, "second": 3 * BLOCK_TOKENS}
    assert service.num_computed == len(prompt) + 5


def test_a_prompt_of_complete_blocks_computes_its_last_block(model: Model) -> None:
    """Its last token must be computed, and the page of that is written."""
    (prompt,) = prompts_of(3 * BLOCK_TOKENS)
    service = TinyService(model)
    answers = [service.answer(name, prompt, GREEDY) for name in "ab"]
    assert answers == [expected(model, prompt)] * 2
    assert service.num_cached["b"] == 2 * BLOCK_TOKENS


def test_the_next_turn_of_a_conversation_has_prompt_and_answer_cached(model: Model) -> None:
    (prompt, question) = prompts_of(20, 7)
    service = TinyService(model)
    answer = service.answer("first", prompt, GREEDY)
    turn = [*prompt, *answer, *question]
    assert service.answer("second", turn, GREEDY) == expected(model, turn)
    # The KV of the answer's newest token was never computed.
    assert service.num_cached["second"] == (20 + 12 - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_the_newest_token_of_an_answer_is_not_cached_when_it_ends_a_block(model: Model) -> None:
    (prompt,) = prompts_of(2 * BLOCK_TOKENS - 12)
    service = TinyService(model)
    answer = service.answer("first", prompt, GREEDY)
    turn = [*prompt, *answer, 5]
    assert len(turn) - 1 == 2 * BLOCK_TOKENS
    assert service.answer("second", turn, GREEDY) == expected(model, turn)
    assert service.num_cached["second"] == BLOCK_TOKENS


def test_a_request_shares_pages_with_one_that_runs_and_outlives_it(model: Model) -> None:
    (prompt,) = prompts_of(2 * BLOCK_TOKENS + 3)
    service = TinyService(model)
    long = SamplingParams(max_tokens=40, temperature=0.0)
    service.submit("first", prompt, GREEDY)
    service.turn()
    service.submit("second", [*prompt, 9, 8], long)
    service.turn()
    (ledger,) = service.core.ledgers
    assert ledger.num_leases == 2
    service.run()
    assert service.num_cached["second"] == 2 * BLOCK_TOKENS
    assert service.tokens["first"] == expected(model, prompt)
    assert service.tokens["second"] == expected(model, [*prompt, 9, 8], long)


def test_salts_keep_prompts_apart(model: Model) -> None:
    (prompt,) = prompts_of(40)
    service = TinyService(model)
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        service.answer(name, prompt, GREEDY, salt=salt)
    assert service.num_cached == {"a": 0, "b": 0, "c": 2 * BLOCK_TOKENS}


def test_a_prompt_whose_tokens_are_reported_is_computed_whole_and_leaves_its_kv(model: Model) -> None:
    (prompt,) = prompts_of(40)
    service = TinyService(model)
    reporting = SamplingParams(max_tokens=12, temperature=0.0, prompt_logprobs=True, num_logprobs=0)
    answers = [
        service.answer(name, prompt, how) for name, how in (("a", reporting), ("b", reporting), ("c", GREEDY))
    ]
    assert answers == [expected(model, prompt)] * 3
    assert service.num_cached == {"a": 0, "b": 0, "c": 2 * BLOCK_TOKENS}
    assert service.num_queried == len(prompt), "only the last one might find anything"


def test_penalties_know_the_tokens_that_are_not_computed(model: Model) -> None:
    (prompt,) = prompts_of(40)
    penalised = SamplingParams(max_tokens=12, temperature=0.0, repetition_penalty=1.5, presence_penalty=0.5)
    service = TinyService(model)
    service.answer("warm", prompt, GREEDY)
    assert service.answer("r", prompt, penalised) == expected(model, prompt, penalised)
    assert service.num_cached["r"] == 2 * BLOCK_TOKENS


def test_layers_that_look_back_a_little_only_find_what_they_need(load_tiny: LoadTiny) -> None:
    from transformers import MistralConfig

    model = load_tiny(MistralConfig(**SHAPE, sliding_window=WINDOW))[0]
    (prompt,) = prompts_of(40)
    service = TinyService(model)
    service.answer("warm", prompt, GREEDY)
    assert service.answer("r", prompt, GREEDY) == expected(model, prompt)
    assert service.num_cached["r"] == 2 * BLOCK_TOKENS


def test_after_a_reset_nothing_is_cached_and_what_runs_goes_on(model: Model) -> None:
    (prompt,) = prompts_of(40)
    service = TinyService(model)
    service.submit("running", prompt, GREEDY)
    service.turn()
    assert service.core.reset_prefix_cache() == 2
    service.turn()
    service.submit("next", prompt, GREEDY)
    service.run()
    assert service.num_cached["next"] == 0
    assert service.tokens["running"] == service.tokens["next"] == expected(model, prompt)


def test_the_blocks_of_a_dead_worker_are_gone(model: Model) -> None:
    (prompt,) = prompts_of(40)
    service = TinyService(model)
    service.answer("a", prompt, GREEDY)
    service.submit("b", prompt, GREEDY)
    service.turn()
    service.kill_pool("decode-0")
    service.run()
    assert service.answer("c", prompt, GREEDY) == service.tokens["b"] == expected(model, prompt)
    assert service.num_cached["c"] == 2 * BLOCK_TOKENS


def test_prompts_that_share_what_is_not_cached_yet_compute_it_once(model: Model) -> None:
    """The first of them leaves at once, the others after it: with what is their own."""
    (shared, *ends) = prompts_of(4 * BLOCK_TOKENS, 3, 5, 7)
    prompts = {name: [*shared, *end] for name, end in zip("abc", ends, strict=True)}
    prompts["d"] = prompts_of(30)[0]
    service = TinyService(model)
    for name, prompt in prompts.items():
        service.submit(name, prompt, GREEDY)
    service.run()
    assert [sorted(batch) for batch in service.batches] == [["a", "d"], ["b", "c"]]
    assert service.num_computed == 4 * BLOCK_TOKENS + 3 + 30 + 5 + 7
    assert service.tokens == {name: expected(model, prompt) for name, prompt in prompts.items()}


def test_prompts_that_share_little_leave_together(model: Model) -> None:
    (shared, *ends) = prompts_of(3 * BLOCK_TOKENS, 20, 22)
    service = TinyService(model)
    for name, end in zip("ab", ends, strict=True):
        service.submit(name, [*shared, *end], GREEDY)
    service.run()
    assert service.batches == [["a", "b"]]


def test_who_waits_for_a_prompt_that_is_cancelled_goes_on_without_it(model: Model) -> None:
    (prompt,) = prompts_of(5 * BLOCK_TOKENS)
    service = TinyService(model)
    service.submit("a", prompt, GREEDY)
    service.submit("b", prompt, GREEDY)
    service.core.cancel("a", 0.0)
    assert service.num_cached == {}
    service.run()
    assert service.batches == [["b"]]
    assert service.tokens["b"] == expected(model, prompt)


def test_a_request_goes_to_the_worker_that_has_its_prompt_unless_that_is_full(model: Model) -> None:
    first, second = prompts_of(50, 50)
    service = TinyService(model, num_pools=2)
    service.submit("other", second, SamplingParams(max_tokens=40, temperature=0.0))
    service.turn()
    service.submit("first-0", first, GREEDY)
    service.turn()
    assert service.pool_of == {"other": "decode-0", "first-0": "decode-1"}, "the emptier one"
    for i in range(1, 6):
        service.submit(f"first-{i}", first, GREEDY)
        service.turn()
    pools = [service.pool_of[f"first-{i}"] for i in range(6)]
    assert pools == ["decode-1"] * MAX_NUM_SEQS + ["decode-0"] * 2
    service.run()
    cached = [service.num_cached[f"first-{i}"] for i in range(6)]
    assert cached == [0, *(3 * BLOCK_TOKENS,) * 3, 0, 3 * BLOCK_TOKENS]
    assert service.tokens["first-5"] == expected(model, first)


def test_requests_of_one_batch_are_left_to_the_workers_that_have_their_prompts(model: Model) -> None:
    first, second = prompts_of(50, 50)
    service = TinyService(model, num_pools=2)
    service.submit("other", second, SamplingParams(max_tokens=30, temperature=0.0))
    service.turn()
    service.submit("one", first, GREEDY)
    service.run()
    for name, prompt in (("a", first), ("b", second), ("c", first), ("d", second)):
        service.submit(name, prompt, GREEDY)
    service.run()
    assert service.batches[2:] == [["a", "c"], ["b", "d"]]
    assert [service.num_cached[name] for name in "abcd"] == [3 * BLOCK_TOKENS] * 4


def test_who_had_to_leave_its_pages_finds_there_what_is_left(model: Model) -> None:
    long = SamplingParams(max_tokens=40, temperature=0.0)
    prompts = dict(zip("ab", prompts_of(20, 20), strict=True))
    service = TinyService(model, num_pages=12)
    for name, prompt in prompts.items():
        service.submit(name, prompt, long)
    service.run()
    assert service.ends.requeues == {"preempted": 1}
    assert service.num_prefilled - service.num_computed >= BLOCK_TOKENS
    assert service.tokens == {name: expected(model, prompt, long) for name, prompt in prompts.items()}


def test_what_is_not_where_it_should_be_is_refused_once_and_computed_again(model: Model) -> None:
    """A page of a cached block has another owner, of which the scheduler does not know."""
    (prompt,) = prompts_of(40)
    service = TinyService(model)
    service.answer("a", prompt, GREEDY)  # under epoch 1, in the first pages
    service.answer("short", prompt[:5], GREEDY)
    other = Lease(decode_worker="decode-0", epoch=2, page_ids=(1,))
    assert service.pools["decode-0"].claim([other]) == {}
    assert service.answer("b", prompt, GREEDY) == expected(model, prompt)
    assert service.ends.refusals == {"write": 1}
    assert service.ends.requeues == {"stale_lease": 1}
    assert service.num_cached["b"] == 0
    service.answer("c", prompt, GREEDY)
    assert service.num_cached["c"] == 2 * BLOCK_TOKENS


@pytest.mark.parametrize("seed", range(4))
def test_random_trees_of_prompts_give_the_same_tokens_whatever_happens(model: Model, seed: int) -> None:
    """Too few pages for all, so that blocks are evicted and sequences preempted; some are cancelled; a worker dies."""
    rng = random.Random(seed)
    nodes: list[list[int]] = [[]]
    for _ in range(14):
        nodes.append(rng.choice(nodes)[:48] + [rng.randrange(2, 128) for _ in range(rng.randint(6, 24))])
    prompts = {f"r{i}": rng.choice(nodes[1:])[:72] for i in range(24)}
    samplings = {name: SamplingParams(max_tokens=rng.randint(1, 20), temperature=0.0) for name in prompts}
    plain = TinyService(model, num_pages=60, cached=False)
    for name, prompt in prompts.items():
        plain.submit(name, prompt, samplings[name])
    plain.run()
    service = TinyService(model, num_pages=16, num_pools=1 + seed % 2)
    cancelled = set(rng.sample(sorted(prompts), 4))
    for i, (name, prompt) in enumerate(prompts.items()):
        service.submit(name, prompt, samplings[name])
        for _ in range(rng.randint(0, 6)):
            service.turn()
        if cancelled & {name}:
            service.core.cancel(name, 0.0)
        if i == 15:
            service.kill_pool("decode-0")
    service.run()
    for name, tokens in service.tokens.items():
        assert tokens == plain.tokens[name] or (
            name in cancelled and tokens == plain.tokens[name][: len(tokens)]
        )
    assert sum(service.num_cached.values()) > 0
    assert sum(ledger.cache.num_evicted_pages for ledger in service.core.ledgers) > 0
