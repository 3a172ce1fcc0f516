"""Model families, each as a tiny random model, against transformers' own `generate`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import (
    GptOssConfig,
    HunYuanMoEV1Config,
    MambaConfig,
    Phi3Config,
    PreTrainedConfig,
    T5Config,
)

from scheduler.errors import ConfigError
from scheduler.messages import SamplingParams
from tests.unit.worker.tiny_models import (
    FAMILIES,
    MAX_MODEL_LEN,
    SHAPE,
    VOCAB_SIZE,
    WINDOW,
    Engines,
    LoadTiny,
    own_tokens,
    prompts_of,
)
from worker.model import ModelSource, load_model


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
        # Its router looks at the type of a weight, which packed layers on the CPU do not have.
        (
            HunYuanMoEV1Config(**SHAPE, head_dim=16, num_experts=2, moe_topk=1),
            "hunyuan_v1_moe needs something that is not supported: AttributeError",
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


def test_long_rope_is_served_up_to_its_first_context_only(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, **factors}
    config = Phi3Config(**SHAPE, rope_parameters=rope, original_max_position_embeddings=48)
    config.save_pretrained(tmp_path)
    source = ModelSource(name="tiny", folder=tmp_path, load_format="dummy")
    assert load_model(source).info.max_model_len == 48
    with pytest.raises(ConfigError, match="max_model_len must be <= 48"):
        load_model(replace(source, max_model_len=49))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tiny"):
        load_model(ModelSource(name="tiny", folder=tmp_path))
    FAMILIES["llama"].save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(ModelSource(name="tiny", folder=tmp_path))


@pytest.mark.parametrize("known", [True, False])
def test_code_in_a_model_folder_is_not_run(
    known: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor is anybody asked whether it may be: a family that transformers knows is served by its own code."""
    FAMILIES["llama"].save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["auto_map"] = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
    path.write_text(json.dumps(config if known else {**config, "model_type": "theirs"}))
    (tmp_path / "theirs.py").write_text("raise SystemExit('it ran')")
    source = ModelSource(name="tiny", folder=tmp_path, load_format="dummy")
    if known:
        assert load_model(source).info.vocab_size == VOCAB_SIZE
    else:
        with pytest.raises(ConfigError, match="cannot read its config"):
            load_model(source)
    assert "[y/N]" not in capfd.readouterr().out
