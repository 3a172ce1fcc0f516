"""Every way to choose tokens, and the report of logprobs, captured on a GPU: the same as on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from graphs.buckets import StepLadder
from graphs.layout import BatchInputs, SlotInput
from graphs.programs import Computation
from graphs.runner import GraphRunner
from graphs.shaping import ShapingBuffers, SlotShaping
from scheduler.messages import SamplingParams
from tests.unit.worker.tiny_models import FAMILIES, MAX_MODEL_LEN, Engines, prompts_of
from worker.compiled import compile_choice
from worker.model import ModelSource, load_model
from worker.sampling import CHOICES, COMPILABLE_CHOICES, needed_choice
from worker.sampling.logprobs import make_report, read_report

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # torch and inductor warn of much that is not ours.
    pytest.mark.filterwarnings("default"),
]
VOCAB_SIZE = 1000
NUM_SLOTS = 6
Choice = Callable[[torch.Tensor, BatchInputs], torch.Tensor]


def runner_of(device: str, choices: Mapping[str, Choice] = CHOICES) -> GraphRunner:
    """A runner whose logits are random, and follow from the token."""
    generator = torch.Generator().manual_seed(0)
    table = (2 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator)).to(device)

    def forward(inputs: BatchInputs) -> torch.Tensor:
        return table[inputs.token_ids.long()]

    runner = GraphRunner(
        Computation(
            forward=forward, finishes=choices, choose_finish=needed_choice, report=make_report(VOCAB_SIZE)
        ),
        StepLadder(NUM_SLOTS),
        pages_per_slot=2,
        page_size=16,
        device=torch.device(device),
        shaping=ShapingBuffers(
            max_slots=NUM_SLOTS, vocab_size=VOCAB_SIZE, history_tokens=200, device=torch.device(device)
        ),
    )
    runner.prepare()
    return runner


def batches_of(choice: str, count: int) -> list[list[SlotInput]]:
    """Batches that need this choice, of various sizes and settings."""
    random = np.random.default_rng(1)
    batches = []
    for index in range(count):
        slots = []
        for _ in range(random.integers(1, NUM_SLOTS + 1)):
            slot = SlotInput(
                token_ids=(int(random.integers(VOCAB_SIZE)),),
                num_cached=20,
                page_ids=(1, 2),
                seed=int(random.integers(2**62)),
                output_index=int(random.integers(9)),
                banned_ids=random.integers(VOCAB_SIZE, size=random.integers(4)).tolist(),
                reported=index % 2 == 0,
            )
            if choice in ("sampled", "filtered", "shaped_filtered"):
                slot = replace(slot, temperature=float(random.choice([0.0, 0.7, 1.4])))
            if choice in ("filtered", "shaped_filtered"):
                slot = replace(slot, top_k=int(random.choice([0, 40])), top_p=float(random.choice([0.8, 1])))
            slots.append(slot)
        slots[0] = replace(slots[0], temperature=0.0 if choice in ("greedy", "shaped") else 1.1)
        if choice in ("filtered", "shaped_filtered"):
            slots[0] = replace(slots[0], top_p=0.9)
        if choice in ("shaped", "shaped_filtered"):
            slots = [replace(slot, shaping=shaping_of(random)) for slot in slots[:-1]] + slots[-1:]
            slots[0] = replace(slots[0], shaping=shaping_of(random))
        batches.append(slots)
    return batches


def shaping_of(random: np.random.Generator) -> SlotShaping:
    allowed = random.integers(2**32, size=-(-VOCAB_SIZE // 32), dtype=np.uint32).view(np.int32)
    num_bias = int(random.integers(4))
    return SlotShaping(
        min_p=float(random.choice([0.0, 0.1])),
        presence_penalty=float(random.choice([0.0, 1.5])),
        frequency_penalty=float(random.choice([0.0, 0.8])),
        repetition_penalty=float(random.choice([1.0, 1.7])),
        bias_ids=random.choice(VOCAB_SIZE, num_bias, replace=False).tolist(),
        bias_values=random.normal(0, 4, num_bias).tolist(),
        num_prompt=int(random.integers(1, 20)),
        history=random.integers(VOCAB_SIZE, size=20).astype(np.int32),
        allowed=allowed if random.integers(2) else None,
    )


@pytest.mark.parametrize(
    ("choice", "compiled"),
    [*((choice, False) for choice in CHOICES), *((c, True) for c in sorted(COMPILABLE_CHOICES))],
)
def test_a_captured_choice_and_report_are_those_of_the_cpu(choice: str, compiled: bool) -> None:
    # The whole batch is chosen by one of them, but the first one runs with every batch.
    choices = {**CHOICES, choice: compile_choice(CHOICES[choice], any_slots=True)} if compiled else CHOICES
    on_cpu, on_gpu = runner_of("cpu"), runner_of("cuda", choices)
    batches = batches_of(choice, 60)
    # All are under way before the first is taken: a batch must not find the settings of the next.
    tickets = [on_gpu.submit(slots) for slots in batches]
    for slots, ticket in zip(batches, tickets, strict=True):
        assert needed_choice(slots) == choice
        expected = on_cpu.submit(slots)
        assert ticket.result() == expected.result()
        assert len(ticket.report()) == len(expected.report()) == (len(slots) if slots[0].reported else 0)
        for row, own, token in zip(ticket.report(), expected.report(), ticket.result(), strict=False):
            got, wanted = read_report(row, token, 20), read_report(own, token, 20)
            assert [i for i, _ in got.top] == [i for i, _ in wanted.top]
            assert [p for _, p in got.top] == pytest.approx([p for _, p in wanted.top], abs=1e-4)
            assert got.logprob == pytest.approx(wanted.logprob, abs=1e-4)


def test_penalties_and_logprobs_of_captured_engines_are_those_of_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    own = AutoModelForCausalLM.from_config(
        FAMILIES["qwen3"], dtype=torch.float32, attn_implementation="eager"
    )
    own.save_pretrained(tmp_path)
    own = own.eval().to("cuda")
    source = ModelSource(
        name="tiny", folder=tmp_path, dtype="float32", device="cuda", max_model_len=MAX_MODEL_LEN
    )
    engines = Engines(load_model(source))
    sampling = SamplingParams(
        max_tokens=8, temperature=0.0, repetition_penalty=1.5, num_logprobs=3, prompt_logprobs=True
    )
    prompts = prompts_of(5, 70, 17)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        made = own.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=8,
            do_sample=False,
            repetition_penalty=1.5,
            eos_token_id=None,
            pad_token_id=0,
        )
        expected.append(made[0, len(prompt) :].tolist())
    # Steps are launched ahead here: penalties must count tokens that the host does not know yet.
    assert engines.generate(prompts, sampling) == expected
    result = engines.run_prefill([engines.item("r", prompts[1], sampling)])
    # 69 tokens have one to predict after them, and the largest bucket has 32.
    assert result.eager_steps == {"prompt_logprobs": 3}
    with torch.inference_mode():
        logprobs = torch.log_softmax(own(torch.tensor([prompts[1]], device="cuda")).logits[0], dim=-1).cpu()
    (outcome,) = result.outcomes
    assert outcome.prompt_logprobs is not None
    reports = [*outcome.prompt_logprobs[1:], outcome.logprobs]
    for row, token, report in zip(logprobs, [*prompts[1][1:], expected[1][0]], reports, strict=True):
        assert report is not None
        assert report.logprob == pytest.approx(float(row[token]), abs=2e-3)
        assert [p for _, p in report.top] == pytest.approx(row.topk(3).values.tolist(), abs=2e-3)
