from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from graphs.buckets import Segment
from scheduler.messages import DecodeStart, SamplingParams, SequenceRef, Timing
from tests.unit.worker.tiny_models import FAMILIES, SHAPE, Engines, LoadTiny
from worker.flops import PrefillCost, peak_by_name, peak_flops


@pytest.mark.parametrize("family", ["llama", "llama_one_kv_head_tied", "qwen3", "gemma2"])
def test_what_is_counted_is_what_torch_counts(family: str, load_tiny: LoadTiny) -> None:
    """Torch counts attention of all tokens to all, of which causal attention needs about half."""
    config, length = FAMILIES[family], 12
    ours, theirs = load_tiny(config)
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        theirs.set_attn_implementation("eager")
        theirs(torch.arange(2, 2 + length)[None], logits_to_keep=1)
    head_dim = getattr(config, "head_dim", None) or SHAPE["hidden_size"] // 4
    per_pair = 4 * 4 * head_dim * 3
    expected = counter.get_total_flops() - per_pair * (length**2 - length * (length + 1) / 2)
    cost = PrefillCost.of(ours)
    assert cost.flops([[Segment(0, 0, length)]]) == pytest.approx(expected, rel=1e-3)


def test_a_prompt_in_chunks_needs_the_same_but_for_their_last_tokens(load_tiny: LoadTiny) -> None:
    cost = PrefillCost.of(load_tiny(FAMILIES["llama"])[0])
    whole = cost.flops([[Segment(0, 0, 50)]])
    assert cost.flops([[Segment(0, 0, 20)], [Segment(0, 20, 50)]]) == whole + cost.per_sequence


def test_experts_are_not_guessed_at(load_tiny: LoadTiny) -> None:
    assert PrefillCost.of(load_tiny(FAMILIES["qwen3_moe"])[0]).flops([[Segment(0, 0, 9)]]) == 0


def test_what_a_batch_and_a_step_report(load_tiny: LoadTiny) -> None:
    """The step's first token of a sequence tells what its handoff took, and no later one does."""
    model, _ = load_tiny(FAMILIES["llama"])
    engines, sampling = Engines(model), SamplingParams(max_tokens=5, temperature=0.0)
    items = [engines.item("a", [3, 4, 5], sampling), engines.item("b", [6, 7], sampling)]
    result = engines.run_prefill(items)
    expected = PrefillCost.of(model).flops([[Segment(0, 0, 3), Segment(1, 0, 2)]])
    assert result.flops == pytest.approx(expected)
    for item, outcome in zip(items, result.outcomes, strict=True):
        assert outcome.token_id is not None
        engines.decode.add(
            DecodeStart(
                request=item.request, lease=item.lease, first_token_id=outcome.token_id, handoff_s=0.25
            )
        )
    first, second = engines.decode.step(), engines.decode.step()
    assert [event.timing for _, event in first.events] == [Timing(handoff_s=0.25)] * 2
    assert [event.timing for _, event in second.events] == [None] * 2
    assert (first.bucket, first.eager_reason) == ("2x2", None)
    engines.decode.cancel(SequenceRef(request_id="a", epoch=items[0].lease.epoch))
    engines.decode.cancel(SequenceRef(request_id="b", epoch=items[1].lease.epoch))
    assert engines.decode.step().bucket == ""


def test_peaks_by_name() -> None:
    assert peak_by_name("NVIDIA H100 80GB HBM3") == peak_by_name("NVIDIA H200") == 989e12
    assert peak_by_name("NVIDIA H100 PCIe") == 756e12
    assert peak_by_name("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_by_name("NVIDIA A10") == 125e12
    assert peak_by_name("NVIDIA L40S") == 362e12
    assert peak_by_name("Something else") is None
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None
