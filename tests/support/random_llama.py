"""A Llama with random weights that costs next to nothing, with a tokenizer of one word a token."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM


def save_random_llama(folder: Path) -> None:
    """Write the model into `folder`; the same weights each time. Seeds torch."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        # Larger than usual, so that the best token changes with the text and does not win by a hair.
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = WordLevel({f"word{i} ": i for i in range(512)}, unk_token="word0 ")
    Tokenizer(words).save(str(folder / "tokenizer.json"))
