"""Grammars that outputs must match: which tokens may come next, by llguidance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from scheduler.errors import InvalidRequestError
from scheduler.messages import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{0,64}"
"""Enough to indent by. Without a limit, some models write spaces until they run out of tokens."""
_MAX_MESSAGE_CHARS = 300


class Grammars:
    """Owns what all grammars of one model share: its tokenizer as llguidance sees it. Made when first needed."""

    def __init__(self, folder: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """Return a matcher for one output, at its beginning.

        Raises `InvalidRequestError` if the grammar is none, or the model has no tokenizer or no EOS token for it.
        """
        # Importing llguidance takes a third of a second, and its tokenizer half a second or more.
        from llguidance import LLMatcher, LLParserLimits

        if self._tokenizer is None:
            self._tokenizer = self._make_tokenizer()
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=limits)
        return GrammarMatcher(
            matcher, grammar.kind, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids
        )

    def _make_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer
        from tokenizers import Tokenizer

        path = self._folder / "tokenizer.json"
        if not path.is_file() or not self._eos_token_ids:
            missing = "EOS token" if path.is_file() else "tokenizer"
            raise InvalidRequestError(
                f"structured output needs a model with a tokenizer and EOS: no {missing}"
            )
        own = Tokenizer.from_file(str(path))
        # Some published files cut or pad every text, as their training did.
        own.no_truncation()
        own.no_padding()
        try:
            return LLTokenizer(own.to_str(), n_vocab=self._vocab_size, eos_token=self._eos_token_ids)
        except ValueError as error:
            raise InvalidRequestError(
                f"structured output cannot be had with this model's tokenizer: {error}"
            ) from error


class GrammarMatcher:
    """Follows one output. EOS may come only where the grammar accepts what there is, and must once that is complete."""

    def __init__(
        self, matcher: LLMatcher, kind: str, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._matcher = matcher
        self._kind = kind
        self._eos_token_ids = eos_token_ids
        self._num_words = -(-vocab_size // 32)
        self._check()

    def accept(self, token_ids: Sequence[int]) -> None:
        """Go on over tokens of the output. Raises `InvalidRequestError` if the grammar does not allow them."""
        for token in token_ids:
            # Once nothing can follow, llguidance is not always pleased with the EOS that it asks for.
            if not (token in self._eos_token_ids and self._matcher.is_stopped()):
                self._matcher.consume_token(token)
        self._check()

    def allowed(self) -> NDArray[np.int32]:
        """Return which tokens may come next: bit i % 32 of word i // 32 is that of token i.

        Raises `InvalidRequestError` if that takes more work than llguidance's limits allow, or there is none.
        """
        mask = np.zeros(self._num_words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()
        if not mask.any():
            raise InvalidRequestError(f"{self._kind} leaves no token that could come next")
        return mask

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = " ".join(self._matcher.get_error().split())[:_MAX_MESSAGE_CHARS]
            raise InvalidRequestError(f"{self._kind} is not usable: {reason}")


def _source(grammar: Grammar) -> str:
    """Return a grammar in llguidance's own form. Raises `InvalidRequestError` if the text is not of its kind."""
    from llguidance import LLMatcher, regex_to_lark

    match grammar.kind:
        case "json_object":
            return LLMatcher.grammar_from_json_schema(
                {"type": "object"}, defaults={"whitespace_pattern": _JSON_WHITESPACE}
            )
        case "regex":
            # Digits are 0 to 9, whatever else Unicode calls one.
            return f"start: /{regex_to_lark(grammar.text, 'd')}/"
        case "json_schema":
            try:
                return LLMatcher.grammar_from_json_schema(
                    grammar.text, defaults={"whitespace_pattern": _JSON_WHITESPACE}
                )
            except ValueError as error:
                raise InvalidRequestError(f"json_schema is not usable: {error}") from error
        case "choice":
            return _choice(grammar.text)


def _choice(text: str) -> str:
    try:
        choices = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidRequestError(f"choice must be a JSON list of strings: {error}") from error
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) for c in choices):
        raise InvalidRequestError("choice must be a JSON list of at least one string")
    # Strings of llguidance's grammars are written as those of JSON.
    return "start: " + " | ".join(map(json.dumps, choices))
