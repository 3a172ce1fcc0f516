from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

import worker.model
from tests.unit.worker.tiny_models import MAX_MODEL_LEN, LoadTiny
from worker.model import Model, ModelSource, load_model


@pytest.fixture
def load_tiny(tmp_path: Path) -> LoadTiny:
    """Return a function that makes a random model, and loads it for serving and as transformers' own."""

    def load(config: PreTrainedConfig) -> tuple[Model, PreTrainedModel]:
        torch.manual_seed(0)
        own = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        own.save_pretrained(tmp_path)
        served = load_model(
            ModelSource(name="tiny", folder=tmp_path, dtype="float32", max_model_len=MAX_MODEL_LEN)
        )
        return served, own

    return load


@pytest.fixture
def unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a model's layers as they are on a GPU, where they are compiled."""
    monkeypatch.setattr(worker.model, "fuse_layers", lambda *_: frozenset())
