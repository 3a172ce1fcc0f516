"""The JSON of the OpenAI completions API: what clients send and what they get.

Null counts as "not given" everywhere. Unknown and vendor fields are ignored; those that would change the
result and are not supported are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from scheduler.errors import InvalidRequestError
from scheduler.messages import FinishReason

MAX_PROMPTS = 128
MAX_CHOICES = 128
MAX_STOPS = 4
DEFAULT_MAX_TOKENS = 16
MAX_PRIORITY = 100
MAX_TTFT_SLO_MS = 3_600_000

Prompt = str | tuple[int, ...]
"""One prompt: text, or token ids."""

_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "add_special_tokens": (True,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "ebnf": (),
    "echo": (False,),
    "frequency_penalty": (0,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "logit_bias": ({},),
    "logprobs": (),
    "min_p": (0,),
    "presence_penalty": (0,),
    "prompt_embeds": ([],),
    "prompt_logprobs": (),
    "regex": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""Fields of OpenAI, vLLM and SGLang that would change the result, and their values, besides null, that do not."""


def _is_none(value: object) -> bool:
    return value is None


def _whole_number(value: Any) -> Any:
    """JSON knows one kind of number: 16.0 is the integer 16."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_whole_number)]
Float = Annotated[float, Field(allow_inf_nan=False)]


def _parse_prompts(value: Any) -> tuple[Prompt, ...]:
    """Return the prompts of a `prompt` field: one of text or of token ids, or a list of either."""
    if value in ("", []):
        raise PydanticCustomError("empty", "must be provided and non-empty")
    if isinstance(value, str):
        return (_unicode(value),)
    if not isinstance(value, list):
        raise _not_a_prompt()
    if _is_token_ids(value):
        return (tuple(value),)
    if len(value) > MAX_PROMPTS:
        raise PydanticCustomError(
            "too_many",
            "must hold at most {limit} prompts, got {got}",
            {"limit": MAX_PROMPTS, "got": len(value)},
        )
    if not (all(isinstance(item, str) for item in value) or all(_is_token_ids(item) for item in value)):
        raise _not_a_prompt()
    for i, item in enumerate(value):
        if not item:
            raise PydanticCustomError(
                "empty", "must hold non-empty prompts, but prompt {i} is empty", {"i": i}
            )
    return tuple(_unicode(item) if isinstance(item, str) else tuple(item) for item in value)


def _parse_stops(value: Any) -> tuple[str, ...]:
    """Return the strings of a `stop` field, which may be one or a list."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise PydanticCustomError("stop_type", "must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise PydanticCustomError(
            "too_many",
            "must hold at most {limit} strings, got {got}",
            {"limit": MAX_STOPS, "got": len(stops)},
        )
    if not all(stops):
        raise PydanticCustomError("empty", "must not hold an empty string")
    return tuple(stops)


def _unicode(text: str) -> str:
    """Refuse half a surrogate pair, which JSON can write but no text contains."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("unicode", "must be valid Unicode, got half a surrogate pair") from None
    return text


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _not_a_prompt() -> PydanticCustomError:
    return PydanticCustomError(
        "prompt_type", "must be a string, a list of strings, a list of token ids, or a list of such lists"
    )


_TOKEN_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "array",
            "items": {"type": "string", "minLength": 1},
            "minItems": 1,
            "maxItems": MAX_PROMPTS,
        },
        _TOKEN_IDS_SCHEMA,
        {"type": "array", "items": _TOKEN_IDS_SCHEMA, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}

_STOP_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": MAX_STOPS},
    ]
}


class StreamOptions(BaseModel):
    """What a stream holds besides text."""

    model_config = ConfigDict(strict=True, frozen=True)

    include_usage: bool | None = None
    """One more chunk, before the end, that holds the usage and no choice."""


class CompletionRequest(BaseModel):
    """The body of `POST /v1/completions`."""

    model_config = ConfigDict(strict=True, frozen=True)

    model: str
    prompt: Annotated[tuple[Prompt, ...], PlainValidator(_parse_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    max_tokens: Annotated[Int, Field(ge=1)] | None = None
    """None: 16, or fewer if the model's context has no more room."""
    min_tokens: Annotated[Int, Field(ge=0)] = 0
    """Neither an end token nor a stop string ends the text before this many tokens."""
    temperature: Annotated[Float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[Float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[Int, Field(ge=-1)] = 0
    """0 and -1: the whole vocabulary."""
    seed: Annotated[Int, Field(ge=-(2**63), lt=2**63)] | None = None
    """None: another one for each choice of each request."""
    stop: Annotated[tuple[str, ...], PlainValidator(_parse_stops), WithJsonSchema(_STOP_SCHEMA)] = ()
    n: Annotated[Int, Field(ge=1, le=MAX_CHOICES)] = 1
    """Choices for each prompt."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    priority: Annotated[Int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    """The class of the request. Smaller is served first."""
    ttft_slo_ms: Annotated[Float, Field(gt=0, le=MAX_TTFT_SLO_MS)] | None = None
    """Wished time from arrival to first token."""
    user: str = ""
    """Whose request it is: a user's requests share what the API key's are due."""
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")] | None = None
    """The `id` of the answer, by which the request can be deleted while it runs. None: one is made."""
    return_token_ids: bool = False
    """Whether the choices hold the token ids of prompt and completion too, as in vLLM."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls_and_refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        for name, neutral in _UNSUPPORTED.items():
            if name in given and given[name] not in neutral:
                raise InvalidRequestError(f"{name} is not supported, got {shorten(given[name])}", param=name)
        if "best_of" in given and given["best_of"] != given.get("n", 1):
            raise InvalidRequestError("best_of is not supported unless it equals n", param="best_of")
        if given.get("stream_options") and not given.get("stream"):
            raise InvalidRequestError("stream_options is only allowed with stream", param="stream_options")
        return given

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class Usage(BaseModel):
    """Tokens of one HTTP request. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(BaseModel):
    """One generated text, or, in a stream, what was added to it."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: FinishReason | None = None
    token_ids: Annotated[list[int] | None, Field(exclude_if=_is_none)] = None
    """With `return_token_ids`: the tokens of the text, those that ended it included."""
    prompt_token_ids: Annotated[list[int] | None, Field(exclude_if=_is_none)] = None
    """With `return_token_ids`: the prompt; in a stream in the first chunk of each choice only."""


class CompletionResponse(BaseModel):
    """The answer to `POST /v1/completions`. In a stream each chunk is one, with the same id."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    """Unix time in seconds."""
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    """One served model name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    """Unix time in seconds."""
    owned_by: str = "purefill"
    max_model_len: int
    """Most tokens of prompt and completion together."""


class ModelList(BaseModel):
    """The answer to `GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class DeletedRequest(BaseModel):
    """The answer to `DELETE /v1/requests/{id}`."""

    id: str
    object: Literal["request"] = "request"
    deleted: Literal[True] = True


class ErrorInfo(BaseModel):
    """What went wrong. All four fields are always present."""

    message: str
    type: str
    param: str | None
    """The field at fault, such as ``max_tokens``."""
    code: str | None


class ErrorResponse(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorInfo


def shorten(value: object, *, max_chars: int = 80) -> str:
    """Return a short literal of what a client sent, for a message."""
    text = repr(value[:max_chars] if isinstance(value, str | list) else value)
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."
