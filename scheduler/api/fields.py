"""Types of the fields that clients send: what each one takes, and in which words it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from scheduler.errors import InvalidRequestError

MAX_PROMPTS = 128
MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_USER_CHARS = 512
MAX_STOP_TOKENS = 128
MAX_BANNED_TOKENS = 16
"""How many end tokens, the model's own included, `min_tokens` can keep away: workers have room for so many."""
MAX_BIASED_TOKENS = 300
MAX_BIAS = 100

STRICT = ConfigDict(strict=True, frozen=True, use_attribute_docstrings=True)
"""How bodies are read: types as they are sent, and each field's docstring is its description in the schema."""
DOCUMENTED = ConfigDict(use_attribute_docstrings=True)
"""The same for answers."""

Prompt = str | tuple[int, ...]
"""One prompt: text, or token ids."""


def is_none(value: object) -> bool:
    """Say whether a field is None, to leave it out of an answer."""
    return value is None


def shorten(value: object, *, max_chars: int = 80) -> str:
    """Return a short literal of what a client sent, for a message."""
    text = repr(value[:max_chars] if isinstance(value, str | list) else value)
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."


def refuse_unsupported(given: Mapping[str, object], neutral_values: Mapping[str, tuple[object, ...]]) -> None:
    """Raise InvalidRequestError for the first field in `neutral_values` whose given value is none of those."""
    for name, neutral in neutral_values.items():
        if name in given and given[name] not in neutral:
            raise InvalidRequestError(f"{name} is not supported, got {shorten(given[name])}", param=name)


def valid_unicode(text: str) -> str:
    """Return the text. Refuses half a surrogate pair, which JSON can write but no text contains."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("unicode", "must be valid Unicode, got half a surrogate pair") from None
    return text


def _whole_number(value: Any) -> Any:
    """JSON knows one kind of number: 16.0 is the integer 16."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _parse_prompts(value: Any) -> tuple[Prompt, ...]:
    """Return the prompts of a `prompt` field: one of text or of token ids, or a list of either."""
    if value in ("", []):
        raise PydanticCustomError("empty", "must be provided and non-empty")
    if isinstance(value, str):
        return (valid_unicode(value),)
    if not isinstance(value, list):
        raise _not_a_prompt()
    if _are_token_ids(value):
        return (tuple(value),)
    if len(value) > MAX_PROMPTS:
        raise _too_many(f"{MAX_PROMPTS} prompts", value)
    if not (all(isinstance(item, str) for item in value) or all(_are_token_ids(item) for item in value)):
        raise _not_a_prompt()
    for i, item in enumerate(value):
        if not item:
            raise PydanticCustomError(
                "empty", "must hold non-empty prompts, but prompt {i} is empty", {"i": i}
            )
    return tuple(valid_unicode(item) if isinstance(item, str) else tuple(item) for item in value)


def _parse_stops(value: Any) -> tuple[str, ...]:
    """Return the strings of a `stop` field, which may be one or a list."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise PydanticCustomError("stop_type", "must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise _too_many(f"{MAX_STOPS} strings", stops)
    if not all(stops):
        raise PydanticCustomError("empty", "must not hold an empty string")
    if (longest := max(map(len, stops), default=0)) > MAX_STOP_CHARS:
        raise PydanticCustomError(
            "stop_length",
            "must hold strings of at most {limit} characters, got one of {got}",
            {"limit": MAX_STOP_CHARS, "got": longest},
        )
    return tuple(valid_unicode(stop) for stop in stops)


def _parse_token_ids(value: Any) -> tuple[int, ...]:
    if not _are_token_ids(value):
        raise PydanticCustomError("token_ids", "must be a list of token ids")
    if len(value) > MAX_STOP_TOKENS:
        raise _too_many(f"{MAX_STOP_TOKENS} token ids", value)
    return tuple(value)


def _parse_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Return (token id, bias) of an object whose keys are token ids, as JSON's must be strings."""
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias", "must be an object of token ids and numbers")
    if len(value) > MAX_BIASED_TOKENS:
        raise _too_many(f"{MAX_BIASED_TOKENS} tokens", value)
    biases = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise PydanticCustomError(
                "logit_bias", "must have token ids as its keys, got {key}", {"key": shorten(key)}
            )
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= MAX_BIAS:
            raise PydanticCustomError(
                "logit_bias",
                "must have numbers from -{limit} to {limit} as its values, got {bias}",
                {"limit": MAX_BIAS, "bias": shorten(bias)},
            )
        biases[int(key)] = float(bias)
    return tuple(biases.items())


def _are_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _not_a_prompt() -> PydanticCustomError:
    return PydanticCustomError(
        "prompt_type", "must be a string, a list of strings, a list of token ids, or a list of such lists"
    )


def _too_many(limit: str, value: Any) -> PydanticCustomError:
    return PydanticCustomError(
        "too_many", "must hold at most {limit}, got {got}", {"limit": limit, "got": len(value)}
    )


_TOKEN_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "array",
            "items": {"type": "string", "minLength": 1},
            "minItems": 1,
            "maxItems": MAX_PROMPTS,
        },
        {**_TOKEN_IDS_SCHEMA, "minItems": 1},
        {
            "type": "array",
            "items": {**_TOKEN_IDS_SCHEMA, "minItems": 1},
            "minItems": 1,
            "maxItems": MAX_PROMPTS,
        },
    ]
}
_STOP_STRING_SCHEMA: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_STOP_SCHEMA: dict[str, Any] = {
    "anyOf": [
        _STOP_STRING_SCHEMA,
        {"type": "array", "items": _STOP_STRING_SCHEMA, "maxItems": MAX_STOPS},
    ]
}
_LOGIT_BIAS_SCHEMA: dict[str, Any] = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
    "maxProperties": MAX_BIASED_TOKENS,
}

Unicode = Annotated[str, AfterValidator(valid_unicode)]
Int = Annotated[int, BeforeValidator(_whole_number)]
Float = Annotated[float, Field(allow_inf_nan=False)]
Prompts = Annotated[tuple[Prompt, ...], PlainValidator(_parse_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
Stops = Annotated[tuple[str, ...], PlainValidator(_parse_stops), WithJsonSchema(_STOP_SCHEMA)]
TokenIds = Annotated[
    tuple[int, ...],
    PlainValidator(_parse_token_ids),
    WithJsonSchema({**_TOKEN_IDS_SCHEMA, "maxItems": MAX_STOP_TOKENS}),
]
LogitBias = Annotated[
    tuple[tuple[int, float], ...], PlainValidator(_parse_logit_bias), WithJsonSchema(_LOGIT_BIAS_SCHEMA)
]
