"""Shapes of public models, for benchmarks on random weights: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

_QWEN3: dict[str, Any] = {
    "vocab_size": 151_936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
    "dtype": "bfloat16",
}
_SHAPES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "qwen3-0.6b": (
        Qwen3Config,
        {
            **_QWEN3,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-8b": (
        Qwen3Config,
        {
            **_QWEN3,
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-32b": (
        Qwen3Config,
        {
            **_QWEN3,
            "hidden_size": 5120,
            "intermediate_size": 25_600,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-tiny": (  # of no public model: for a look at a script without a GPU
        Qwen3Config,
        {
            **_QWEN3,
            "vocab_size": 1024,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 16,
            "head_dim": 16,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "llama-3.2-1b": (
        LlamaConfig,
        {
            "vocab_size": 128_256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
            },
            "bos_token_id": 128_000,
            "eos_token_id": 128_001,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        },
    ),
}
NAMES = tuple(_SHAPES)


def write_shape(name: str, folder: Path, *, num_layers: int | None = None) -> Path:
    """Write the configuration of a shape into a new folder below `folder`; return that.

    `num_layers` makes a model of fewer layers of the same shape.
    """
    config_class, values = _SHAPES[name]
    if num_layers is not None:
        values = {**values, "num_hidden_layers": num_layers}
    target = folder / name
    target.mkdir(parents=True)
    config = config_class(**values)
    config.architectures = ["Qwen3ForCausalLM" if config_class is Qwen3Config else "LlamaForCausalLM"]
    config.save_pretrained(target)
    return target
