"""Turn a GGUF file into the Hugging Face folder that the rest of purefill loads.

Run as ``python -m worker.convert GGUF OUT``, so that the process that asks for it need not import torch.
"""

from __future__ import annotations

import logging
import shutil
import sys
from pathlib import Path

import gguf
import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from scheduler.errors import ConfigError


def convert_gguf(gguf_path: Path, out: Path) -> None:
    """Write `out` with config.json, generation_config.json, model.safetensors (bfloat16) and the tokenizer.

    The folder appears whole or not at all. Raises `ConfigError` if `gguf_path` cannot be read as a GGUF file,
    or its tokenizer splits text in a way that is not known here.
    """
    pre_tokenizer = _pre_tokenizer(gguf_path)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        model = _load_dense(gguf_path)
        model.save_pretrained(partial)
        max_length = model.config.max_position_embeddings
        _save_tokenizer(gguf_path, pre_tokenizer, partial, max_length=max_length)
        for file in partial.iterdir():
            file.chmod(0o644)  # safetensors makes files that only their owner can read
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _load_dense(gguf_path: Path) -> PreTrainedModel:
    """Return the model with its weights unpacked to bfloat16, and no trace of the quantization left."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.bfloat16
    )
    # transformers refuses to save what it holds for quantized; these weights are plain by now.
    packed = [name for name, weight in model.named_parameters() if weight.dtype != torch.bfloat16]
    assert not packed, f"weights were not unpacked: {packed[:3]}"
    del model.hf_quantizer
    del model.config.quantization_config
    return model


def _save_tokenizer(
    gguf_path: Path, pre_tokenizer: pre_tokenizers.PreTokenizer, folder: Path, *, max_length: int
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.model_max_length = max_length
    tokenizer.save_pretrained(folder)


def _pre_tokenizer(gguf_path: Path) -> pre_tokenizers.PreTokenizer:
    """Return how the model's own tokenizer cuts text before it merges bytes.

    A GGUF file names the rule only, and transformers takes GPT-2's for all. SmolLM's also sets every digit
    apart, which moves the spaces before a number: two spaces are one token there, and two tokens in GPT-2's.
    """
    try:
        field = gguf.GGUFReader(gguf_path).get_field("tokenizer.ggml.pre")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{gguf_path} cannot be read as a GGUF file: {error}") from error
    rule = field.contents() if field else None
    if rule != "smollm":
        raise ConfigError(f"{gguf_path}: tokenizer.ggml.pre must be 'smollm', got {rule!r}")
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def main(argv: list[str] | None = None) -> int:
    """Convert ``GGUF OUT``. Returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 2:
        print("usage: python -m worker.convert GGUF OUT", file=sys.stderr)
        return 2
    # Its warning that bfloat16 slows packed weights down does not apply: they are unpacked.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        convert_gguf(Path(arguments[0]), Path(arguments[1]))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
