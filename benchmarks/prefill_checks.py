"""Checks of prefill graphs on random batches, each against something that does not share its code."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from graphs.buckets import BucketLadder, plan_passes
from graphs.layout import BatchInputs, SlotInput
from graphs.programs import Computation
from graphs.runner import GraphRunner
from worker.model import load_reference

if TYPE_CHECKING:
    from prefill_graphs import Bench

NUM_BATCHES = 200
NUM_REPLAYS = 10_000
MAX_PROMPTS = 16


class LogitsRunner:
    """Graphs of the bench's model that leave the logits of the last tokens where they can be looked at."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        num_slots = bench.num_slots
        model, pool = bench.model, bench.pool
        self._logits = torch.zeros(
            num_slots, model.info.vocab_size, dtype=model.kv_spec.dtype, device=pool.device
        )
        on_gpu = pool.device.type == "cuda"

        def forward(inputs: BatchInputs) -> torch.Tensor:
            return (model.compiled_logits if on_gpu else model.logits)(inputs, pool)

        def keep(rows: torch.Tensor, _: BatchInputs) -> torch.Tensor:
            self._logits[: rows.shape[0]].copy_(rows)
            return rows.argmax(dim=-1)

        self._runner = GraphRunner(
            Computation(forward=forward, finishes={"keep": keep}, choose_finish=lambda _: "keep"),
            BucketLadder(bench.check_tokens, [num_slots]),
            pages_per_slot=-(-model.info.max_model_len // pool.page_size),
            page_size=pool.page_size,
            device=pool.device,
        )
        with torch.inference_mode():
            self._runner.prepare()

    @torch.inference_mode()
    def run(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the logits after each prompt, ``[prompts, V]`` float32; long ones are cut, large batches split."""
        batch = self.bench.batch(prompts)
        largest = self._runner.ladder.buckets[0]
        plan = plan_passes(
            [len(prompt) for prompt in prompts], max_tokens=largest.num_tokens, max_slots=largest.num_slots
        )
        rows: dict[int, torch.Tensor] = {}
        for segments in plan:
            self._runner.submit(
                [
                    SlotInput(
                        token_ids=prompts[s.item][s.start : s.end],
                        num_cached=s.start,
                        page_ids=batch.items[s.item].lease.page_ids,
                    )
                    for s in segments
                ]
            ).result()
            for slot, segment in enumerate(segments):
                rows[segment.item] = self._logits[slot].float()
        return torch.stack([rows[i] for i in range(len(prompts))])


class Reference:
    """Transformers' own model, whole prompts at a time, without pages, graphs or compiled code."""

    def __init__(self, bench: Bench, dtype: torch.dtype) -> None:
        self._model: PreTrainedModel = load_reference(bench.source, attention="sdpa").to(dtype)  # type: ignore[arg-type]

    @torch.inference_mode()
    def run(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the logits after each prompt, ``[prompts, V]`` float32."""
        # Padding on the right is never seen by a causal model's earlier tokens.
        ids = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.int64)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        device = self._model.device
        hidden = self._model.base_model(input_ids=ids.to(device), use_cache=False).last_hidden_state
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
        hidden = hidden[torch.arange(len(prompts), device=device), last]
        logits: torch.Tensor = self._model.get_output_embeddings()(hidden)
        return logits.float()


def random_lengths(numbers: random.Random, max_tokens: int) -> list[int]:
    """Return lengths of 1 to 16 prompts, 1 to `max_tokens` tokens together; small totals are as likely as large."""
    total = round(max_tokens ** numbers.random())
    count = min(numbers.randint(1, MAX_PROMPTS), total)
    cuts = sorted(numbers.sample(range(1, total), count - 1))
    return [end - start for start, end in zip([0, *cuts], [*cuts, total], strict=True)]


def relative_error(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ‖logits - reference‖ / ‖reference‖."""
    return float((logits - reference).norm() / reference.norm())


def check_accuracy(bench: Bench) -> list[str]:
    """Compare 200 random batches with float32; the graphs may err no more than the model's own eager code.

    Then the same prompts in other batches and buckets must give the same greedy token, wherever the best two
    logits differ by more than twice the largest error seen.
    """
    ladder = bench.check_tokens
    runner = LogitsRunner(bench)
    exact, own = Reference(bench, torch.float32), Reference(bench, bench.model.kv_spec.dtype)
    numbers = random.Random(0)
    errors: list[float] = []
    own_errors: list[float] = []
    largest_error = 0.0
    seen: list[tuple[list[int], torch.Tensor]] = []
    for i in range(NUM_BATCHES):
        lengths = random_lengths(numbers, 2 * ladder[-1])
        if i % 10 == 0:  # fill a bucket to the last position: no padding
            lengths = [numbers.choice(ladder[: len(ladder) // 2])]
        prompts = bench.random_prompts(lengths, seed=i)
        logits, reference = runner.run(prompts), exact.run(prompts)
        errors.append(relative_error(logits, reference))
        own_errors.append(relative_error(own.run(prompts), reference))
        largest_error = max(largest_error, float((logits - reference).abs().max()))
        seen.append((prompts[0], logits[0]))
    print(
        f"  accuracy: relative error to float32 {statistics.mean(errors):.2e} (largest {max(errors):.2e}), the "
        f"model's own {statistics.mean(own_errors):.2e} (largest {max(own_errors):.2e}), {NUM_BATCHES} batches"
    )
    failures = []
    if not statistics.mean(errors) <= statistics.mean(own_errors):
        failures.append("accuracy: the graphs err more than the model's own code")
    return failures + _check_invariance(runner, seen, numbers, 2 * largest_error)


def _check_invariance(
    runner: LogitsRunner, seen: Sequence[tuple[list[int], torch.Tensor]], numbers: random.Random, tie: float
) -> list[str]:
    failures = []
    decided = 0
    for _ in range(NUM_BATCHES // 4):
        chosen = numbers.sample(list(seen), numbers.randint(1, MAX_PROMPTS))
        logits = runner.run([prompt for prompt, _ in chosen])
        for row, (prompt, before) in zip(logits, chosen, strict=True):
            best, second = before.topk(2).values.tolist()
            if best - second > tie:
                decided += 1
                if row.argmax() != before.argmax():
                    failures.append(
                        f"invariance: a prompt of {len(prompt)} tokens changed its token with its batch"
                    )
    print(f"  invariance: {decided} prompts whose best two logits differ by more than {tie:.3g}")
    return failures


def check_poison(bench: Bench) -> list[str]:
    """Poison with NaN all that a batch must not see; its logits must stay the same to the last bit.

    That is: every page before the batch, the scratch page included, and the embedding of token 0, which stands at
    pad positions.
    """
    runner = LogitsRunner(bench)
    numbers = random.Random(1)
    batches = []
    for i in range(NUM_BATCHES // 4):
        prompts = bench.random_prompts(random_lengths(numbers, bench.check_tokens[-1] * 2), seed=1000 + i)
        batches.append([[token or 1 for token in prompt] for prompt in prompts])
    # The LM head may share the poisoned row: leave token 0 out.
    clean = [runner.run(prompts)[:, 1:] for prompts in batches]
    failures = []
    with _nan_embedding_of_token_0(bench):
        for prompts, expected in zip(batches, clean, strict=True):
            bench.pool.memory.fill_(float("nan"))
            if not torch.equal(runner.run(prompts)[:, 1:], expected):
                failures.append(f"poison: a batch of {[len(p) for p in prompts]} tokens changed")
    bench.pool.memory.zero_()
    print(f"  poison: {len(batches)} batches, {len(failures)} changed")
    return failures


@contextmanager
def _nan_embedding_of_token_0(bench: Bench) -> Iterator[None]:
    weight = bench.model.embedding
    row = weight[0].clone()
    weight[0] = float("nan")
    yield
    weight[0] = row


def check_endurance(bench: Bench) -> list[str]:
    """Replay 10,000 batches of changing shapes back to back: same tokens each time, and no memory taken."""
    numbers = random.Random(2)
    batches = []
    for i in range(64):
        prompts = bench.random_prompts(random_lengths(numbers, 256), seed=2000 + i)
        batches.append(bench.batch(prompts, temperature=float(i % 3 == 2), top_p=0.9 if i % 6 == 2 else 1.0))

    def tokens(batch: object) -> list[int | None]:
        return [outcome.token_id for outcome in bench.engine.run(batch).outcomes]  # type: ignore[arg-type]

    expected = [tokens(batch) for batch in batches]
    before = _device_memory(bench)
    wrong = 0
    under_way = []
    for i in range(NUM_REPLAYS):
        index = numbers.randrange(len(batches))
        under_way.append((index, bench.engine.submit(batches[index])))
        if len(under_way) == 2 or i == NUM_REPLAYS - 1:
            for done, submitted in under_way:
                wrong += [outcome.token_id for outcome in submitted.result().outcomes] != expected[done]
            under_way.clear()
    taken = _device_memory(bench) - before
    print(f"  endurance: {NUM_REPLAYS} batches, {wrong} wrong, {taken} bytes of memory taken")
    return [f"endurance: {wrong} wrong, {taken} bytes taken"] if wrong or taken > 0 else []


def _device_memory(bench: Bench) -> int:
    return torch.cuda.memory_reserved() if bench.pool.device.type == "cuda" else 0


CHECKS: Mapping[str, Callable[[Bench], list[str]]] = {
    "accuracy": check_accuracy,
    "poison": check_poison,
    "endurance": check_endurance,
}
