"""Fused decoder layers against the families' own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import GraniteConfig, LlamaConfig, PreTrainedConfig

from graphs.buckets import Bucket
from graphs.layout import BatchInputs, BatchLayout, HostBatch, SlotInput
from tests.unit.worker.tiny_models import FAMILIES, MAX_MODEL_LEN, SHAPE, LoadTiny, paged_model, prompts_of
from worker.fused_layers import fuse_layers
from worker.kv_pool import KVPool
from worker.model import Model, ModelSource, load_model

PAGE_SIZE = 8
ALL_LAYERS = frozenset(range(SHAPE["num_hidden_layers"]))  # type: ignore[call-overload]
FUSED_FAMILIES = (
    "llama",
    "llama_one_kv_head_tied",
    "llama_biases",
    "qwen2",
    "qwen3",
    "mistral",
    "mistral_window",
)


def fused(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> frozenset[int]:
    return fuse_layers(paged_model(config, dtype), torch.tensor(prompts_of(20)))


@pytest.mark.parametrize("family", FUSED_FAMILIES)
def test_all_layers_of_the_usual_form_are_fused(family: str) -> None:
    assert fused(FAMILIES[family]) == ALL_LAYERS


@pytest.mark.parametrize("family", ["qwen3_moe", "phi3", "gemma", "gemma2", "gemma3"])
def test_layers_of_other_forms_stay(family: str) -> None:
    assert fused(FAMILIES[family]) == frozenset()


def test_layers_whose_parts_have_the_usual_names_but_which_compute_something_else_stay() -> None:
    # It multiplies what a layer adds.
    assert fused(GraniteConfig(**SHAPE, residual_multiplier=0.5)) == frozenset()
    assert fused(GraniteConfig(**SHAPE, residual_multiplier=1.0)) == ALL_LAYERS


@pytest.mark.parametrize("size", [0.02, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "relu"])
def test_another_activation_is_told_apart_in_16_bits_however_large_the_weights_are(
    activation: str, size: float
) -> None:
    config = LlamaConfig(**{**SHAPE, "initializer_range": size}, hidden_act=activation)
    assert fused(config, torch.bfloat16) == frozenset()


@torch.inference_mode()
def logits_of(model: Model, prompts: Sequence[Sequence[int]], num_slots: int) -> list[torch.Tensor]:
    """Return the logits after each prompt, computed in one pass, and then after one more token, in one step."""
    pool = KVPool.on_device(model.kv_spec, num_pages=64, page_size=PAGE_SIZE, device=model.device)
    page_ids = [range(1 + 13 * i, 14 + 13 * i) for i in range(len(prompts))]
    passes = [
        (
            Bucket(160, num_slots),
            [
                SlotInput(token_ids=p, num_cached=0, page_ids=ids)
                for p, ids in zip(prompts, page_ids, strict=True)
            ],
        ),
        (
            Bucket(num_slots, num_slots),
            [
                SlotInput(token_ids=p[:1], num_cached=len(p), page_ids=ids)
                for p, ids in zip(prompts, page_ids, strict=True)
            ],
        ),
    ]
    logits = []
    for bucket, slots in passes:
        layout = BatchLayout(bucket=bucket, pages_per_slot=13, page_size=PAGE_SIZE)
        host = HostBatch(layout)
        host.pack(slots)
        inputs = BatchInputs.of(layout, host.tensor)
        logits.append(
            model.logits(inputs, pool, is_step=bucket.num_tokens == num_slots)[: len(prompts)].clone()
        )
    return logits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "mistral_window", "qwen3"])
def test_logits_are_the_same_in_any_company(family: str, dtype: str, tmp_path: Path) -> None:
    if dtype == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no bfloat16 products, and such layers stay as they are")
    FAMILIES[family].save_pretrained(tmp_path)
    model = load_model(
        ModelSource(
            name="tiny", folder=tmp_path, dtype=dtype, load_format="dummy", max_model_len=MAX_MODEL_LEN
        )
    )
    prompts = prompts_of(5, 33, 70, 20)
    together = logits_of(model, prompts, 4)
    for i, prompt in enumerate(prompts):
        for alone, beside_others in zip(logits_of(model, [prompt], 2), together, strict=True):
            assert torch.equal(alone[0], beside_others[i])


def test_a_pass_for_one_sequence_computes_its_last_row_as_a_larger_one_does(load_tiny: LoadTiny) -> None:
    served, _ = load_tiny(FAMILIES["llama"])
    prompts = prompts_of(9)
    assert torch.equal(logits_of(served, prompts, 1)[0], logits_of(served, prompts, 4)[0])
