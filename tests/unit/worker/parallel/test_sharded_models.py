"""A model in parts gives the logits of the whole one, and says why if it cannot be cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from graphs.buckets import Bucket
from graphs.layout import BatchInputs, BatchLayout, HostBatch, SlotInput
from scheduler.errors import ConfigError
from tests.support.ranks import run_ranks
from tests.unit.worker.tiny_models import FAMILIES, MAX_MODEL_LEN, PAGE_SIZE, SHAPE, prompts_of
from worker.kv_pool import KVPool
from worker.model import Model, ModelSource, load_model
from worker.parallel.group import ShardGroup
from worker.parallel.plan import shard_layers

CUT = ("llama_biases", "qwen3", "mistral_window", "gemma3")
(PROMPT,) = prompts_of(20)


@dataclass(frozen=True, kw_only=True)
class Computed:
    """What a process makes of a model."""

    logits: torch.Tensor
    """After the prompt, ``[V]``."""
    weights_bytes: int
    num_parameters: int
    num_kv_heads: int


def compute(folder: Path, load_format: str, group: ShardGroup | None = None) -> Computed:
    source = ModelSource(
        name="tiny", folder=folder, dtype="float32", load_format=load_format, max_model_len=MAX_MODEL_LEN
    )
    model = load_model(source, group)
    return Computed(
        logits=logits_of(model),
        weights_bytes=model.weights_bytes,
        num_parameters=model.info.num_parameters,
        num_kv_heads=model.kv_spec.layers[0].num_kv_heads,
    )


@torch.inference_mode()
def logits_of(model: Model) -> torch.Tensor:
    pool = KVPool.on_device(model.kv_spec, num_pages=5, page_size=PAGE_SIZE, device=model.device)
    layout = BatchLayout(bucket=Bucket(32, 2), pages_per_slot=4, page_size=PAGE_SIZE)
    host = HostBatch(layout)
    host.pack([SlotInput(token_ids=PROMPT, num_cached=0, page_ids=(4, 2, 3))])
    return model.logits(BatchInputs.of(layout, host.tensor), pool)[0].clone()


def compute_all(group: ShardGroup, folders: Mapping[str, Path], load_format: str) -> dict[str, Computed]:
    return {name: compute(folder, load_format, group) for name, folder in folders.items()}


def save(config: PreTrainedConfig, folder: Path, max_shard_size: str = "1GB") -> torch.Tensor:
    """Save a random model; return its own logits after the prompt, ``[V]``."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0, -1]
    return logits


def assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    assert (logits - expected).norm() / expected.norm() < 1e-5


def test_two_ranks_compute_the_logits_of_the_whole_model(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in CUT}
    expected = {name: save(FAMILIES[name], folder) for name, folder in folders.items()}
    ranks = run_ranks(compute_all, 2, folders, "auto")
    for name, logits in expected.items():
        for rank in ranks:
            assert_close(rank[name].logits, logits)
            assert rank[name].num_kv_heads == 1
        # Sums over ranks must not differ by rank: whoever chose a token from them would choose another.
        assert torch.equal(ranks[0][name].logits, ranks[1][name].logits)


def test_a_vocabulary_need_not_divide_and_may_be_tied_and_files_may_be_many(tmp_path: Path) -> None:
    odd = LlamaConfig(**{**SHAPE, "vocab_size": 130, "hidden_size": 48, "num_attention_heads": 6})
    odd.num_key_value_heads = 3
    folders = {"odd": tmp_path / "odd", "tied": tmp_path / "tied"}
    expected = {"odd": save(odd, folders["odd"], max_shard_size="20KB")}
    odd.tie_word_embeddings = True
    expected["tied"] = save(odd, folders["tied"])
    assert len([*folders["odd"].glob("*.safetensors")]) > 1
    for rank in run_ranks(compute_all, 3, folders, "auto"):
        for name, logits in expected.items():
            assert_close(rank[name].logits, logits)


def test_random_weights_are_those_of_the_whole_model(tmp_path: Path) -> None:
    folders = {"qwen3": tmp_path / "qwen3", "llama": tmp_path / "llama"}
    for name, folder in folders.items():
        FAMILIES[name].save_pretrained(folder)
    whole = {name: compute(folder, "dummy") for name, folder in folders.items()}
    for rank in run_ranks(compute_all, 2, folders, "dummy"):
        for name, computed in whole.items():
            assert_close(rank[name].logits, computed.logits)
            assert rank[name].num_parameters == computed.num_parameters
            assert rank[name].weights_bytes < 0.7 * computed.weights_bytes


@pytest.mark.parametrize(
    ("config", "size", "reason"),
    [
        (FAMILIES["qwen3_moe"], 2, "mlp.experts"),
        (FAMILIES["phi3"], 2, "self_attn.qkv_proj, which transformers' plan cuts by colwise_gather_output"),
        (FAMILIES["llama_one_kv_head_tied"], 2, "must divide the 1 KV heads"),
        (FAMILIES["llama"], 4, "must divide the 2 KV heads"),
        (
            LlamaConfig(**{**SHAPE, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}),
            2,
            "must divide the 3 KV heads of model tiny, got 2",
        ),
        (LlamaConfig(**{**SHAPE, "intermediate_size": 49}), 2, "must divide the 49 features of"),
    ],
)
def test_what_cannot_be_cut_is_refused(config: PreTrainedConfig, size: int, reason: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=reason):
        shard_layers(model, size, "tiny")


def test_a_family_without_a_plan_is_refused() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(FAMILIES["llama"])
    model._tp_plan = {}
    with pytest.raises(ConfigError, match="no tensor-parallel plan for llama, got 2"):
        shard_layers(model, 2, "tiny")
