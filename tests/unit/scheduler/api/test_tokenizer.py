from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as HfTokenizer

from scheduler.api.tokenizer import NoDetokenizer, Tokenizer
from scheduler.models import resolve_model

# Emoji with joiners, flags and skin tones, CJK, combining marks, control characters and line separators.
MANY_BYTES = st.text(alphabet="👩‍👩‍👧🏽🇩🇪漢字かな한글éé\u0301\u2028\u0085\ufffd\x00\r\n a", max_size=40)


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model("smollm2-135m", progress=print).path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder / "tokenizer.json")


@pytest.fixture(scope="module")
def reference(folder: Path) -> HfTokenizer:
    return HfTokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def partial_token_ids(reference: HfTokenizer) -> list[int]:
    """Tokens that hold part of a character: so few that hypothesis would seldom find two in a row."""
    return [i for i in range(reference.get_vocab_size()) if "\ufffd" in reference.decode([i])]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    (token_ids,) = asyncio.run(tokenizer.encode([text]))
    return list(token_ids)


def pieces(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*map(detokenizer.push, token_ids), detokenizer.flush()]


@given(draws=st.lists(st.tuples(st.booleans(), st.integers(0, 2**20)), max_size=40))
def test_pieces_join_to_the_full_decoding_of_any_token_ids(
    tokenizer: Tokenizer,
    reference: HfTokenizer,
    partial_token_ids: list[int],
    draws: list[tuple[bool, int]],
) -> None:
    token_ids = [
        partial_token_ids[i % len(partial_token_ids)] if partial else i % reference.get_vocab_size()
        for partial, i in draws
    ]
    assert "".join(pieces(tokenizer, token_ids)) == reference.decode(token_ids, skip_special_tokens=True)


@given(text=MANY_BYTES | st.text(max_size=40))
def test_text_comes_back_in_whole_characters(tokenizer: Tokenizer, reference: HfTokenizer, text: str) -> None:
    token_ids = encode(tokenizer, text)
    assume(reference.decode(token_ids) == text)  # a few bytes are not in the vocabulary
    parts = pieces(tokenizer, token_ids)
    assert "".join(parts) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)


def test_a_character_over_several_tokens_is_held_back(tokenizer: Tokenizer) -> None:
    token_ids = encode(tokenizer, "🦩")
    assert len(token_ids) > 1
    assert pieces(tokenizer, token_ids) == ["", *[""] * (len(token_ids) - 2), "🦩", ""]


def test_an_incomplete_character_comes_at_the_end(tokenizer: Tokenizer) -> None:
    token_ids = encode(tokenizer, "a🦩")
    assert pieces(tokenizer, token_ids[:-1]) == ["a", *[""] * (len(token_ids) - 2), "\ufffd"]


def test_special_and_unknown_tokens_have_no_text(tokenizer: Tokenizer, reference: HfTokenizer) -> None:
    end = reference.token_to_id("<|im_end|>")
    assert "".join(pieces(tokenizer, [end, end, 10**6])) == ""


def test_encodes_as_transformers_does(tokenizer: Tokenizer, folder: Path) -> None:
    from transformers import AutoTokenizer

    transformers_tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [
        "Hello, my name is",
        " two  spaces\n\n",
        "漢字 👩‍👩‍👧",
        "<|im_start|>user\nHi<|im_end|>",
        "x" * 5000,
    ]
    assert asyncio.run(tokenizer.encode(texts)) == [
        tuple(transformers_tokenizer(text)["input_ids"]) for text in texts
    ]


def test_long_texts_which_go_to_a_thread_encode_alike(tokenizer: Tokenizer, reference: HfTokenizer) -> None:
    text = "The quick brown fox. " * 500
    assert asyncio.run(tokenizer.encode([text, "Hi"])) == [
        tuple(reference.encode(text).ids),
        tuple(reference.encode("Hi").ids),
    ]


def test_truncation_and_padding_of_the_file_do_not_apply(
    tokenizer: Tokenizer, folder: Path, tmp_path: Path
) -> None:
    cutting = HfTokenizer.from_file(str(folder / "tokenizer.json"))
    cutting.enable_truncation(2)
    cutting.enable_padding(length=100)
    cutting.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.from_folder(tmp_path)
    assert loaded is not None
    assert encode(loaded, "one two three four") == encode(tokenizer, "one two three four")


def test_a_folder_without_tokenizer_has_none(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(tmp_path) is None
    detokenizer = NoDetokenizer()
    assert detokenizer.push(1) + detokenizer.flush() == ""


@pytest.fixture(scope="module")
def sentencepiece_like(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A vocabulary as Llama 2 and Gemma have: words with a mark for the space, and bytes for the rest."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "</s>", *byte_tokens, *"▁abcdefghijklmnopqrstuvwxyz", "th", "the", "▁the"]
    tokenizer = HfTokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[("t", "h"), ("th", "e"), ("▁", "the")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    path = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.json"
    tokenizer.save(str(path))
    return Tokenizer(path)


@given(text=MANY_BYTES.filter(lambda text: "\ufffd" not in text) | st.text("the quick brown", max_size=30))
def test_byte_fallback_text_comes_back_in_whole_characters(sentencepiece_like: Tokenizer, text: str) -> None:
    parts = pieces(sentencepiece_like, encode(sentencepiece_like, text))
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


def test_long_rows_of_invalid_and_special_tokens(sentencepiece_like: Tokenizer) -> None:
    end, lead_byte = 1, 2 + 0xE4
    text = "".join(pieces(sentencepiece_like, [lead_byte] * 1000 + [end] * 1000))
    assert text == "\ufffd" * 1000
