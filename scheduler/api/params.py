"""What completions and chat completions have in common: how tokens are chosen, what ends them, what is reported.

Null counts as "not given" everywhere. Unknown and vendor fields are ignored; those that would change the result
and are not supported are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from scheduler.api.fields import (
    DOCUMENTED,
    MAX_USER_CHARS,
    STRICT,
    Float,
    Int,
    LogitBias,
    Stops,
    TokenIds,
    refuse_unsupported,
)
from scheduler.api.structured import ResponseFormat, StructuredOutputs, grammar_of
from scheduler.errors import InvalidRequestError
from scheduler.messages import Grammar

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_PRIORITY = 100
MAX_TTFT_SLO_MS = 3_600_000
MAX_SALT_CHARS = 256
DEFAULT_MAX_TOKENS = 16
DEFAULT_MAX_CHAT_TOKENS = 2048
"""KV pages are reserved for the longest answer: without a bound a few chats would hold them all."""

UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "ebnf": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": (),
    "logits_processors": ([],),
    "prompt_embeds": ([],),
    "regex": (),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
}
"""Fields of OpenAI, vLLM and SGLang that would change the result, and their values, besides null, that do not."""


class StreamOptions(BaseModel):
    """What a stream holds besides text."""

    model_config = STRICT

    include_usage: bool | None = None
    """One more chunk, before the end, that holds the usage and no choice."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`: every chunk holds the usage up to there."""


class GenerationParams(BaseModel):
    """The fields that `POST /v1/completions` and `POST /v1/chat/completions` share."""

    model_config = STRICT

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = UNSUPPORTED

    model: str
    max_tokens: Annotated[Int, Field(ge=0)] | None = None
    """Most tokens to produce. Completions: 16 if not given. Chat: as `max_completion_tokens`, its newer name."""
    min_tokens: Annotated[Int, Field(ge=0)] = 0
    """Neither an end token nor a stop string ends the text before this many tokens."""
    temperature: Annotated[Float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[Float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[Int, Field(ge=-1)] = 0
    """0 and -1: the whole vocabulary."""
    min_p: Annotated[Float, Field(ge=0, le=1)] = 0.0
    """Tokens less likely than this share of the likeliest are not drawn."""
    presence_penalty: Annotated[Float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[Float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[Float, Field(gt=0, le=100)] = 1.0
    logit_bias: LogitBias = ()
    """What is added to the logits of tokens, by token id."""
    seed: Annotated[Int, Field(ge=-(2**63), lt=2**63)] | None = None
    """None: another one for each choice of each request."""
    stop: Stops = ()
    stop_token_ids: TokenIds = ()
    """The text ends before any of these tokens."""
    include_stop_str_in_output: bool = False
    """Whether the stop string or token that ended the text is part of it."""
    ignore_eos: bool = False
    """Go on after the model's own end tokens."""
    n: Annotated[Int, Field(ge=1, le=MAX_CHOICES)] = 1
    """Choices for each prompt."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    prompt_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Report the prompt's tokens, each with this many of the likeliest; not with `stream`, except 0."""
    response_format: ResponseFormat | None = None
    """Make the text a JSON object, or match a JSON schema."""
    structured_outputs: StructuredOutputs | None = None
    """Make the text match a regular expression, one of some choices, or a JSON schema."""
    skip_special_tokens: bool = True
    """Whether special tokens of the output give no text."""
    truncate_prompt_tokens: Annotated[Int, Field(ge=-1)] | None = None
    """Cut longer prompts to this many tokens; -1: to what the context has room for."""
    truncation_side: Literal["left", "right"] = "left"
    """Where a prompt is cut."""
    return_token_ids: bool = False
    """Whether the choices hold the token ids of prompt and completion too."""
    return_tokens_as_token_ids: bool = False
    """Whether tokens of logprobs are given as ``token_id:N`` rather than as their text."""
    return_timings: bool = False
    """Whether each choice says, at its end, where its time went."""
    priority: Annotated[Int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    """The class of the request. Smaller is served first."""
    ttft_slo_ms: Annotated[Float, Field(gt=0, le=MAX_TTFT_SLO_MS)] | None = None
    """Wished time from arrival to first token."""
    user: Annotated[str, Field(max_length=MAX_USER_CHARS)] = ""
    """Whose request it is: a user's requests share what the API key's are due."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    """Cached KV is only used by requests of the same salt. None: of all requests without one."""
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")] | None = None
    """The `id` of the answer, by which the request can be deleted while it runs. None: one is made."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls_and_refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        refuse_unsupported(given, cls.unsupported)
        if given.get("stream_options") and not given.get("stream"):
            raise InvalidRequestError("stream_options is only allowed with stream", param="stream_options")
        if given.get("truncate_prompt_tokens") == 0:
            raise InvalidRequestError(
                "truncate_prompt_tokens must be >= 1, or -1, got 0", param="truncate_prompt_tokens"
            )
        return given

    @model_validator(mode="after")
    def _check_together(self) -> GenerationParams:
        if self.stream and self.prompt_logprobs:
            raise InvalidRequestError(
                "prompt_logprobs must be 0 with stream: streams do not hold them", param="prompt_logprobs"
            )
        grammar_of(self.response_format, self.structured_outputs)
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream holds the usage."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def grammar(self) -> Grammar | None:
        """What the output must match."""
        return grammar_of(self.response_format, self.structured_outputs)

    @property
    def grammar_param(self) -> str:
        """The field that holds the grammar."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    # What the two kinds of request say in different fields.

    @property
    def asked_max_tokens(self) -> int | None:
        """Most tokens that the client wants."""
        return self.max_tokens

    @property
    def max_tokens_param(self) -> str:
        """The field that says so."""
        return "max_tokens"

    @property
    def default_max_tokens(self) -> int:
        """Most tokens if the client does not say, as far as the context has room."""
        return DEFAULT_MAX_TOKENS

    @property
    def num_top_logprobs(self) -> int | None:
        """How many of the likeliest tokens are reported with each token of the output; None: no logprobs."""
        raise NotImplementedError

    @property
    def wants_echo(self) -> bool:
        """Whether the text begins with the prompt."""
        return False


class PromptTokensDetails(BaseModel):
    """Where the prompt's tokens came from."""

    model_config = DOCUMENTED

    cached_tokens: int = 0
    """Tokens whose KV was in the prefix cache, so that they were not computed: of each prompt's first choice."""


class Usage(BaseModel):
    """Tokens of one HTTP request. A prompt counts once, however many choices it has."""

    model_config = DOCUMENTED

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()
