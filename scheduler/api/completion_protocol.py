"""The JSON of `/v1/completions`: what clients send and what they get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from scheduler.api.fields import DOCUMENTED, Int, Prompts, is_none
from scheduler.api.params import MAX_LOGPROBS, UNSUPPORTED, GenerationParams, Usage
from scheduler.api.timings import Timings
from scheduler.errors import InvalidRequestError
from scheduler.messages import FinishReason


class CompletionRequest(GenerationParams):
    """The body of `POST /v1/completions`."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {**UNSUPPORTED, "suffix": ("",)}

    prompt: Prompts
    logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Report how likely each token was, and so many of the likeliest."""
    echo: bool = False
    """Whether the text begins with the prompt."""
    add_special_tokens: bool = True
    """Whether a text prompt gets the special tokens that the model expects around it."""

    @model_validator(mode="before")
    @classmethod
    def _check_best_of(cls, data: Any) -> Any:
        if (
            isinstance(data, dict)
            and data.get("best_of") is not None
            and data["best_of"] != (data.get("n") or 1)
        ):
            raise InvalidRequestError("best_of is not supported unless it equals n", param="best_of")
        return data

    @property
    def num_top_logprobs(self) -> int | None:
        """How many of the likeliest tokens are reported with each token of the output; None: no logprobs."""
        return self.logprobs

    @property
    def wants_echo(self) -> bool:
        """Whether the text begins with the prompt."""
        return self.echo


class PromptLogprob(BaseModel):
    """How likely one token was at a place of the prompt."""

    model_config = DOCUMENTED

    logprob: float
    rank: int | None
    """1 for the likeliest. None: not among the reported ones."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One entry a prompt token, by token id; null for the first, which nothing predicts."""


class CompletionLogprobs(BaseModel):
    """How likely the tokens of a text were; in a stream, those of the chunk. The lists have the same length."""

    model_config = DOCUMENTED

    text_offset: list[int]
    """Where each token's text begins, in characters of the whole text."""
    token_logprobs: list[float | None]
    """Natural logarithms; null for the first token of a prompt."""
    tokens: list[str]
    """A token that is not valid UTF-8 by itself is given as ``bytes:\\xNN...``."""
    top_logprobs: list[dict[str, float] | None]
    """The likeliest tokens, and the token itself."""


class CompletionChoice(BaseModel):
    """One generated text, or, in a stream, what was added to it."""

    model_config = DOCUMENTED

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: Annotated[str | int | None, Field(exclude_if=is_none)] = None
    """The stop string or token id of the request that ended the text; null for the model's own end."""
    prompt_logprobs: Annotated[PromptLogprobs | None, Field(exclude_if=is_none)] = None
    """With `prompt_logprobs`; never in a stream."""
    token_ids: Annotated[list[int] | None, Field(exclude_if=is_none)] = None
    """With `return_token_ids`: the tokens of the text, those that ended it included."""
    prompt_token_ids: Annotated[list[int] | None, Field(exclude_if=is_none)] = None
    """With `return_token_ids`: the prompt; in a stream in the first chunk of each choice only."""
    timings: Annotated[Timings | None, Field(exclude_if=is_none)] = None
    """With `return_timings`; in a stream in the last chunk of each choice only."""


class CompletionResponse(BaseModel):
    """The answer to `POST /v1/completions`. In a stream each chunk is one, with the same id."""

    model_config = DOCUMENTED

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    """Unix time in seconds."""
    model: str
    choices: list[CompletionChoice]
    usage: Annotated[Usage | None, Field(exclude_if=is_none)] = None
