"""Text to token ids and back, with the `tokenizers` library on a model folder's `tokenizer.json`."""

from __future__ import annotations

import asyncio
import codecs
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders

TOKENIZER_FILE = "tokenizer.json"

_INLINE_CHARS = 2048
"""Text up to this length takes about a millisecond to encode: the event loop can spare that."""

_INLINE_TOKENS = 1024
"""The same for decoding."""

_NORMALISED_CHARS = 4
_REPLACEMENT = "\ufffd"
_SENTENCEPIECE_SPACE = "\u2581"
_MAX_HELD_TOKENS = 32


class Detokenizer(Protocol):
    """Turns the tokens of one sequence into text as they come. Returns whole characters only."""

    def push(self, token_id: int) -> str:
        """Return the text that this token completes, perhaps none."""

    def flush(self) -> str:
        """Return what is left once the sequence has ended; an incomplete character comes as U+FFFD."""


class Tokenizer:
    """Owns the vocabulary of one model. Shared by all requests."""

    def __init__(self, path: Path) -> None:
        """Load the file `tokenizer.json` at `path`."""
        self._tokenizer = HfTokenizer.from_file(str(path))
        # Some published files cut or pad every text, as their training did.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        is_byte_level = isinstance(self._tokenizer.decoder, decoders.ByteLevel)
        self._all_bytes = _token_bytes(self._tokenizer, is_byte_level=is_byte_level)
        special = {i for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special}
        self._text_bytes = [b"" if i in special else part for i, part in enumerate(self._all_bytes)]
        self._is_byte_level = is_byte_level
        bare = self._tokenizer.encode("a", add_special_tokens=False).ids
        self._num_tokens_before = _position(bare, self._tokenizer.encode("a").ids)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer | None:
        """Return the tokenizer of a model folder, or None if the folder holds none."""
        path = folder / TOKENIZER_FILE
        return cls(path) if path.is_file() else None

    @property
    def num_tokens_before(self) -> int:
        """How many special tokens come before a text that is encoded with special tokens."""
        return self._num_tokens_before

    @property
    def max_token_chars(self) -> int:
        """Most characters of a text that become one token.

        Where a text is normalised before it is cut into tokens, an estimate: no normalisation of Unicode makes one
        character of more than four.
        """
        longest = max(map(len, self._all_bytes), default=1)
        is_exact = self._tokenizer.normalizer is None and self._is_byte_level
        return longest if is_exact else _NORMALISED_CHARS * longest

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[tuple[int, ...]]:
        """Return the token ids of each text, with the special tokens that the model expects around a prompt.

        Long texts are encoded in a thread, so that the event loop goes on.
        """
        if sum(map(len, texts)) <= _INLINE_CHARS:
            encode = self._tokenizer.encode
            return [tuple(encode(text, add_special_tokens=add_special_tokens).ids) for text in texts]
        return await asyncio.to_thread(self._encode_batch, list(texts), add_special_tokens)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of whole sequence of tokens. Long ones are decoded in a thread."""
        decode = self._tokenizer.decode
        if len(token_ids) <= _INLINE_TOKENS:
            return str(decode(token_ids, skip_special_tokens=skip_special_tokens))
        return str(await asyncio.to_thread(decode, list(token_ids), skip_special_tokens=skip_special_tokens))

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """Return a new detokenizer for one sequence."""
        if self._is_byte_level:
            return _ByteDetokenizer(self._text_bytes if skip_special_tokens else self._all_bytes)
        return _WindowDetokenizer(self._tokenizer, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return what one token stands for, special ones too; perhaps a part of a character."""
        return self._all_bytes[token_id] if token_id < len(self._all_bytes) else b""

    def _encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[tuple[int, ...]]:
        # encode_batch, unlike encode, lets other threads run.
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
        return [tuple(encoding.ids) for encoding in encodings]


class NoDetokenizer:
    """The detokenizer of a model without a tokenizer: no token has text."""

    def push(self, token_id: int) -> str:
        """Return "" for any token."""
        return ""

    def flush(self) -> str:
        """Return ""."""
        return ""


class _ByteDetokenizer:
    """For byte-level vocabularies: each token is some bytes, and the text is their UTF-8 decoding."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        in_table = token_id < len(self._token_bytes)
        return self._utf8.decode(self._token_bytes[token_id]) if in_table else ""

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDetokenizer:
    """For every other vocabulary: decodes the last few tokens twice, with and without the newest ones.

    The text of a token depends on the ones before it (a leading space, a character in several byte tokens),
    so the difference of the two decodings is what is new. A text that ends in U+FFFD may end inside a
    character and is held back, for `_MAX_HELD_TOKENS` tokens at most. Where byte tokens do not make valid
    UTF-8, the number of U+FFFD may differ from that of the whole sequence decoded at once.
    """

    def __init__(self, tokenizer: HfTokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._num_done = 0  # tokens of the window whose text is out

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        return self._take(final=len(self._window) - self._num_done >= _MAX_HELD_TOKENS)

    def flush(self) -> str:
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        done = self._tokenizer.decode(self._window[: self._num_done], skip_special_tokens=self._skip)
        text = self._tokenizer.decode(self._window, skip_special_tokens=self._skip)
        new = text[len(done) :]
        if not final and (not new or new.endswith(_REPLACEMENT)):
            return ""
        del self._window[: self._num_done]
        self._num_done = len(self._window)
        return new


def _position(part: Sequence[int], whole: Sequence[int]) -> int:
    """Return where `part` begins in `whole`; 0 if it is not in it."""
    starts = range(len(whole) - len(part) + 1)
    return next((i for i in starts if whole[i : i + len(part)] == part), 0)


def _token_bytes(tokenizer: HfTokenizer, *, is_byte_level: bool) -> list[bytes]:
    """Return the bytes of each token id, of special ones too."""
    char_bytes = _byte_level_alphabet()
    added = tokenizer.get_added_tokens_decoder()
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        if token_id in added:
            table[token_id] = token.encode()
        elif is_byte_level:
            try:
                table[token_id] = bytes([char_bytes[char] for char in token])
            except KeyError:  # an added token, which stands for itself
                table[token_id] = token.encode()
        elif match := re.fullmatch("<0x([0-9A-F]{2})>", token):
            table[token_id] = bytes.fromhex(match[1])
        else:
            table[token_id] = token.replace(_SENTENCEPIECE_SPACE, " ").encode()
    return table


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character of GPT-2's byte-level alphabet.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, for the characters from
    U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update((chr(256 + i), byte) for i, byte in enumerate(others))
    return alphabet
