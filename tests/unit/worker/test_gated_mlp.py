"""Gated feed-forward parts as one operator, against the families' own."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaConfig

from tests.unit.worker.tiny_models import FAMILIES, SHAPE, paged_model, prompts_of
from worker.gated_mlp import GatedMlp, fuse_gated_mlps
from worker.gated_tilings import choose_tiling
from worker.merge import merge_projections
from worker.trial import TrialPass

TOKENS = torch.tensor(prompts_of(20))


@pytest.mark.parametrize(
    ("family", "count"),
    [
        ("llama", SHAPE["num_hidden_layers"]),
        ("qwen3", SHAPE["num_hidden_layers"]),
        ("mistral_window", SHAPE["num_hidden_layers"]),
        ("phi3", SHAPE["num_hidden_layers"]),  # One layer projects to gate and up as it comes.
        ("llama_biases", 0),
        ("gemma2", 0),  # Its activation is another one.
    ],
)
@torch.inference_mode()
def test_parts_of_the_usual_form_are_one_operator_and_compute_the_same(family: str, count: int) -> None:
    model = paged_model(FAMILIES[family])
    merge_projections(model)
    before = model(input_ids=TOKENS, use_cache=False, paged=TrialPass()).logits
    assert fuse_gated_mlps(model, TOKENS) == count
    assert sum(isinstance(module, GatedMlp) for module in model.modules()) == count
    torch.testing.assert_close(model(input_ids=TOKENS, use_cache=False, paged=TrialPass()).logits, before)


@pytest.mark.parametrize("size", [0.02, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3"])
@torch.inference_mode()
def test_another_activation_is_told_apart_in_16_bits_however_large_the_weights_are(
    family: str, size: float
) -> None:
    config = copy.deepcopy(FAMILIES[family])
    config.initializer_range = size
    model = paged_model(config, torch.bfloat16)
    merge_projections(model)
    assert fuse_gated_mlps(model, TOKENS) == 0


@pytest.mark.parametrize("size", [0.02, 0.5, 1.0])
@torch.inference_mode()
def test_parts_of_the_usual_form_are_found_in_16_bits(size: float) -> None:
    model = paged_model(LlamaConfig(**{**SHAPE, "initializer_range": size}), torch.bfloat16)
    merge_projections(model)
    assert fuse_gated_mlps(model, TOKENS) == SHAPE["num_hidden_layers"]


@pytest.mark.parametrize(
    ("num_tokens", "tokens"),
    # What was fastest on an H200, of Qwen3-8B's 4,096 inputs and 12,288 outputs.
    [(128, 128), (256, 128), (384, 128), (512, 256), (1024, 256), (2048, 256), (8192, 256)],
)
def test_the_tiling_is_that_which_was_fastest(num_tokens: int, tokens: int) -> None:
    tiling = choose_tiling(num_tokens, 4096, 12288, num_multiprocessors=132)
    assert tiling is not None
    assert tiling.tokens == tokens


@pytest.mark.parametrize(
    ("num_tokens", "num_inputs", "num_outputs"),
    [
        (64, 4096, 12288),  # so few tokens that the weight's way from memory is all that counts
        (512, 4096 + 32, 12288),  # columns that are no whole steps
        (512, 320, 12288),  # fewer columns than a ring has
        (512, 4096, 12284),  # rows that are no whole eights
        (128, 4096, 3072),  # tiles for a quarter of the multiprocessors
    ],
)
def test_cublas_computes_what_the_kernel_cannot_or_not_as_fast(
    num_tokens: int, num_inputs: int, num_outputs: int
) -> None:
    assert choose_tiling(num_tokens, num_inputs, num_outputs, num_multiprocessors=132) is None
