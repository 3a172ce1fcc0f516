"""The last layer with the rows that are wanted, against all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    CohereConfig,
    GraniteConfig,
    Olmo2Config,
    PreTrainedModel,
    StableLmConfig,
    Starcoder2Config,
)

from graphs.buckets import Bucket
from graphs.layout import BatchInputs, BatchLayout, HostBatch, SlotInput
from scheduler.errors import ConfigError
from tests.unit.worker.tiny_models import FAMILIES, SHAPE, LoadTiny, paged_model, prompts_of
from worker.kv_pool import KVPool
from worker.last_layer import LastLayer, cut_last_layer
from worker.model import ModelSource, load_model
from worker.trial import TrialPass

TOKENS = torch.tensor(prompts_of(20))
CUT = {
    **FAMILIES,
    # They scale what a layer adds, compute attention and the rest side by side, and have norms with biases.
    "granite": GraniteConfig(**SHAPE, residual_multiplier=0.5),
    "cohere": CohereConfig(**SHAPE),
    "starcoder2": Starcoder2Config(**SHAPE),
}


@torch.inference_mode()
def hidden_states(model: PreTrainedModel, **settings: torch.Tensor) -> torch.Tensor:
    hidden: torch.Tensor = model.model(
        input_ids=TOKENS, use_cache=False, paged=TrialPass(), **settings
    ).last_hidden_state[0]
    return hidden


@pytest.mark.parametrize("family", CUT)
def test_the_rows_that_are_kept_are_those_of_the_whole_layer(family: str) -> None:
    model = paged_model(CUT[family])
    whole = hidden_states(model)
    assert cut_last_layer(model, TOKENS)
    kept = torch.tensor([19, 3, 7])
    torch.testing.assert_close(hidden_states(model, kept=kept), whole[kept])
    torch.testing.assert_close(hidden_states(model), whole)


def test_a_layer_of_another_form_stays_as_it_was() -> None:
    model = paged_model(Olmo2Config(**SHAPE))  # Its norms come after attention and feed-forward part.
    whole = hidden_states(model)
    assert not cut_last_layer(model, TOKENS)
    assert not any(isinstance(module, LastLayer) for module in model.modules())
    assert torch.equal(hidden_states(model), whole)


def test_the_model_finds_what_it_looks_up_in_its_layers() -> None:
    model = paged_model(FAMILIES["llama"])
    model.model.layers[-1].attention_type = "full_attention"  # As the models of some families do.
    assert cut_last_layer(model, TOKENS)
    assert model.model.layers[-1].attention_type == "full_attention"
    assert not hasattr(model.model.layers[-1], "no_such_setting")


@torch.inference_mode()
def test_a_layer_of_which_the_model_goes_on_with_all_rows_stays_as_it_was() -> None:
    model = paged_model(FAMILIES["llama"])
    # As if the model added what an earlier layer made.
    earlier: list[torch.Tensor] = []
    model.model.layers[0].register_forward_hook(lambda _, __, output: earlier.append(output))
    model.model.norm.register_forward_pre_hook(lambda _, args: (args[0] + earlier[-1],))
    whole = hidden_states(model)
    assert not cut_last_layer(model, TOKENS)
    assert torch.equal(hidden_states(model), whole)


def test_a_layer_that_mixes_tokens_outside_of_attention_stays_as_it_was() -> None:
    model = paged_model(FAMILIES["llama"])
    model.model.layers[-1].mlp.register_forward_hook(lambda _, __, output: output.cumsum(1))
    assert not cut_last_layer(model, TOKENS)


@torch.inference_mode()
def test_products_after_the_last_attention_are_of_the_wanted_rows_alone(load_tiny: LoadTiny) -> None:
    served, _ = load_tiny(FAMILIES["phi3"])
    rows: list[int] = []
    for layer, is_head in served.linear_layers():
        if not is_head:
            layer.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[-2]))
    layout = BatchLayout(bucket=Bucket(16, 2), pages_per_slot=2, page_size=8)
    host = HostBatch(layout)
    host.pack([SlotInput(token_ids=prompt, num_cached=0, page_ids=(1, 2)) for prompt in prompts_of(4, 5)])
    pool = KVPool.on_device(served.kv_spec, num_pages=3, page_size=8, device=served.device)
    served.logits(BatchInputs.of(layout, host.tensor), pool)
    # Projections to queries, keys and values; output; gate and up; down: the last three of the last layer.
    assert rows == [16] * 9 + [2] * 3


def test_a_family_whose_layers_drop_what_they_are_told_is_refused(tmp_path: Path) -> None:
    StableLmConfig(**SHAPE).save_pretrained(tmp_path)
    source = ModelSource(name="tiny", folder=tmp_path, load_format="dummy", max_model_len=64)
    with pytest.raises(ConfigError, match="StableLmAttention does not hand on"):
        load_model(source)
