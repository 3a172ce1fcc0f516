"""Model families, each as a tiny random model, against transformers' own `generate`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    T5Config,
)

from scheduler.errors import ConfigError
from scheduler.messages import SamplingParams
from tests.unit.worker.tiny_models import MAX_MODEL_LEN, SHAPE, VOCAB_SIZE, Engines, LoadTiny, prompts_of
from worker.model import ModelSource, load_model

WINDOW = 6
"""Less than most of the prompts."""

FAMILIES = {
    "llama": LlamaConfig(**SHAPE),
    "llama_one_kv_head_tied": LlamaConfig(**{**SHAPE, "num_key_value_heads": 1}, tie_word_embeddings=True),
    "llama_biases": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
    "mistral_window": MistralConfig(**SHAPE, sliding_window=WINDOW),
    "phi3": Phi3Config(**SHAPE),
    "phi3_window": Phi3Config(**SHAPE, sliding_window=WINDOW),
    "gemma": GemmaConfig(**SHAPE, head_dim=16),
    # Tied and scaled by sqrt(hidden_size), the embedding of the last token would decide the next one alone.
    "gemma2": Gemma2Config(
        **SHAPE, tie_word_embeddings=False, head_dim=16, sliding_window=WINDOW, attn_logit_softcapping=0.5
    ),
    "gemma3": Gemma3TextConfig(
        **SHAPE,
        tie_word_embeddings=False,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}


def own_tokens(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers_generate(family: str, load_tiny: LoadTiny) -> None:
    served, own = load_tiny(FAMILIES[family])
    # One prompt longer than the largest bucket, and more prompts than slots: chunks and splits.
    prompts = prompts_of(1, 13, 70, 7, 24, 3)
    tokens = Engines(served).generate(prompts, SamplingParams(max_tokens=10, temperature=0.0))
    assert tokens == [own_tokens(own, prompt, 10) for prompt in prompts]
    # A model that always says the same would prove little.
    assert len({token for sequence in tokens for token in sequence}) > 10


def save_config(folder: Path, config: PreTrainedConfig) -> ModelSource:
    config.save_pretrained(folder)
    return ModelSource(
        name="tiny", folder=folder, dtype="float32", load_format="dummy", max_model_len=MAX_MODEL_LEN
    )


def test_random_weights_are_the_same_for_every_worker(tmp_path: Path) -> None:
    source = save_config(tmp_path, FAMILIES["qwen3"])
    prompts = prompts_of(5, 20)
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    first, second = (Engines(load_model(source)).generate(prompts, sampling) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (T5Config(vocab_size=VOCAB_SIZE, d_model=32, d_ff=32, num_layers=1, num_heads=2), "not decoder-only"),
        (
            MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, state_size=4),
            "no KV to page",
        ),
        (
            GptOssConfig(
                **SHAPE, head_dim=16, num_local_experts=2, num_experts_per_tok=1, sliding_window=WINDOW
            ),
            "attention sinks are not supported",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_what_cannot_be_served_is_refused_with_the_reason(
    config: PreTrainedConfig, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_model(save_config(tmp_path, config))


@pytest.mark.parametrize(("max_model_len", "accepted"), [(MAX_MODEL_LEN, True), (MAX_MODEL_LEN + 1, False)])
def test_context_is_at_most_the_models_own(max_model_len: int, accepted: bool, tmp_path: Path) -> None:
    FAMILIES["llama"].save_pretrained(tmp_path)
    source = ModelSource(name="tiny", folder=tmp_path, load_format="dummy", max_model_len=max_model_len)
    if accepted:
        assert load_model(source).info.max_model_len == max_model_len
    else:
        with pytest.raises(ConfigError, match=f"max_model_len must be <= {MAX_MODEL_LEN}"):
            load_model(source)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tiny"):
        load_model(ModelSource(name="tiny", folder=tmp_path))
    FAMILIES["llama"].save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(ModelSource(name="tiny", folder=tmp_path))
