"""Logprobs as clients see them: OpenAI's two forms, and vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scheduler.api.output import PlacedLogprobs
from scheduler.api.tokenizer import Tokenizer
from scheduler.messages import TokenLogprobs

_LEAST = -9999.0
"""JSON has no infinity."""


class TokenNames:
    """How tokens are written in logprobs. Without a tokenizer, or if asked, as their ids."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool) -> None:
        self._tokenizer = None if as_ids else tokenizer

    def text(self, token_id: int) -> str:
        """Return the token's text. Where its bytes are no whole characters: ``bytes:`` and their escapes.

        So every token of a vocabulary has a name of its own, which the keys of an object need.
        """
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def shown(self, token_id: int) -> tuple[str, list[int]]:
        """Return the token's text, with U+FFFD for what is no whole character, and its bytes."""
        if self._tokenizer is None:
            name = f"token_id:{token_id}"
            return name, list(name.encode())
        raw = self._tokenizer.token_bytes(token_id)
        return raw.decode(errors="replace"), list(raw)


def completion_logprobs(entries: Sequence[PlacedLogprobs], num_top: int, names: TokenNames) -> dict[str, Any]:
    """Return the `logprobs` of a choice of a completion."""
    return {
        "text_offset": [entry.offset for entry in entries],
        "token_logprobs": [entry.logprobs and _finite(entry.logprobs.logprob) for entry in entries],
        "tokens": [names.text(entry.token_id) for entry in entries],
        "top_logprobs": [
            entry.logprobs
            and {names.text(i): _finite(p) for i, p in _top_and_itself(entry.logprobs, num_top)}
            for entry in entries
        ],
    }


def chat_logprobs(entries: Sequence[PlacedLogprobs], num_top: int, names: TokenNames) -> dict[str, Any]:
    """Return the `logprobs` of a choice of a chat."""
    return {
        "content": [
            {
                **_named(entry.token_id, entry.logprobs.logprob, names),
                "top_logprobs": [_named(i, logprob, names) for i, logprob in entry.logprobs.top[:num_top]],
            }
            for entry in entries
            if entry.logprobs is not None
        ],
        "refusal": None,
    }


def prompt_logprobs(
    entries: Sequence[TokenLogprobs | None], num_top: int, names: TokenNames
) -> list[dict[str, Any] | None]:
    """Return the `prompt_logprobs` of a prompt."""
    return [None if entry is None else _by_token_id(entry, num_top, names) for entry in entries]


def _by_token_id(entry: TokenLogprobs, num_top: int, names: TokenNames) -> dict[str, Any]:
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(entry.top, start=1)}
    return {
        str(i): {"logprob": _finite(logprob), "rank": ranks.get(i), "decoded_token": names.shown(i)[0]}
        for i, logprob in _top_and_itself(entry, num_top)
    }


def _top_and_itself(entry: TokenLogprobs, num_top: int) -> list[tuple[int, float]]:
    """Return the likeliest tokens, and the token itself if it is not among them."""
    top = list(entry.top[:num_top])
    if all(token_id != entry.token_id for token_id, _ in top):
        top.append((entry.token_id, entry.logprob))
    return top


def _named(token_id: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    text, raw = names.shown(token_id)
    return {"token": text, "logprob": _finite(logprob), "bytes": raw}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
