"""The JSON of `/v1/chat/completions`: what clients send and what they get."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from scheduler.api.completion_protocol import PromptLogprobs
from scheduler.api.fields import DOCUMENTED, STRICT, Int, Unicode, is_none, valid_unicode
from scheduler.api.params import DEFAULT_MAX_CHAT_TOKENS, MAX_LOGPROBS, UNSUPPORTED, GenerationParams, Usage
from scheduler.api.timings import Timings
from scheduler.errors import InvalidRequestError
from scheduler.messages import FinishReason

MAX_MESSAGES = 2048
MAX_PARTS = 2048
MAX_TOOL_CALLS = 128


def _parse_content(value: Any) -> str:
    """Return the text of a message's `content`: a string, or a list of parts, whose texts are lines."""
    if isinstance(value, str):
        return valid_unicode(value)
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise PydanticCustomError("content_type", "must be a string or a list of content parts")
    if len(value) > MAX_PARTS:
        raise PydanticCustomError(
            "too_many", "must hold at most {limit} parts, got {got}", {"limit": MAX_PARTS, "got": len(value)}
        )
    for part in value:
        if part.get("type") != "text":
            raise PydanticCustomError(
                "content_part",
                "must hold parts of type text only, got type {got}",
                {"got": repr(part.get("type"))},
            )
        if not isinstance(part.get("text"), str):
            raise PydanticCustomError("content_part", "must hold parts whose text is a string")
    return valid_unicode("\n".join(part["text"] for part in value))


_CONTENT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
            "maxItems": MAX_PARTS,
        },
    ]
}


class FunctionCall(BaseModel):
    """What an assistant wanted to call."""

    model_config = STRICT

    name: Unicode
    arguments: Unicode
    """A JSON object as text."""


class ToolCall(BaseModel):
    """One call of an assistant's message."""

    model_config = STRICT

    id: Unicode
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    """One message of a conversation."""

    model_config = STRICT

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, PlainValidator(_parse_content), WithJsonSchema(_CONTENT_SCHEMA)] = ""
    name: Unicode | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOL_CALLS)] = []
    tool_call_id: Unicode | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        if "content" not in given and not given.get("tool_calls") and given.get("role") != "assistant":
            raise PydanticCustomError("missing_content", "must have content")
        return given

    def variables(self) -> dict[str, Any]:
        """Return what a chat template sees of it. Raises InvalidRequestError."""
        seen: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content,
        }
        if self.name is not None:
            seen["name"] = self.name
        if self.tool_call_id is not None:
            seen["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            seen["tool_calls"] = [
                {
                    "id": call.id,
                    "type": call.type,
                    # Templates write the arguments themselves, from an object.
                    "function": {
                        "name": call.function.name,
                        "arguments": _arguments(call.function.arguments),
                    },
                }
                for call in self.tool_calls
            ]
        return seen


def _arguments(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"the arguments of a tool call must be JSON: {error}", param="messages"
        ) from error


class ChatPrompt(BaseModel):
    """The fields that make the prompt of a chat."""

    model_config = STRICT

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    add_generation_prompt: bool = True
    """Whether the prompt ends where the assistant's answer begins."""
    add_special_tokens: bool = False
    """Whether the prompt gets the special tokens around it that the chat template may have put there already."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables for the model's chat template, such as ``enable_thinking``."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """A variable for the model's chat template."""

    @property
    def num_chars(self) -> int:
        """Characters of all messages."""
        return sum(len(message.content) for message in self.messages)


class ChatRequest(GenerationParams, ChatPrompt):
    """The body of `POST /v1/chat/completions`."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **UNSUPPORTED,
        "audio": (),
        "best_of": (1,),
        "chat_template": (),
        "continue_final_message": (False,),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": (),
        "web_search_options": (),
    }

    max_completion_tokens: Annotated[Int, Field(ge=0)] | None = None
    """Most tokens to produce. None: as many as the context has room for, 2048 at most."""
    logprobs: bool = False
    """Report how likely each token was."""
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """With `logprobs`: report so many of the likeliest tokens too."""

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs is only allowed with logprobs true", param="top_logprobs")
        return self

    @property
    def asked_max_tokens(self) -> int | None:
        """Most tokens that the client wants."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def max_tokens_param(self) -> str:
        """The field that says so."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def default_max_tokens(self) -> int:
        """Most tokens if the client does not say, as far as the context has room."""
        return DEFAULT_MAX_CHAT_TOKENS

    @property
    def num_top_logprobs(self) -> int | None:
        """How many of the likeliest tokens are reported with each token of the output; None: no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TopLogprob(BaseModel):
    """How likely one token was."""

    model_config = DOCUMENTED

    token: str
    logprob: float
    """A natural logarithm."""
    bytes: list[int]
    """UTF-8; a part of a character is possible."""


class TokenLogprob(TopLogprob):
    """How likely a token of the output was, and the likeliest at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """How likely the tokens of a message were; in a stream, those of the chunk."""

    model_config = DOCUMENTED

    content: list[TokenLogprob]
    refusal: None = None


class AssistantMessage(BaseModel):
    """A generated message."""

    model_config = DOCUMENTED

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class Delta(BaseModel):
    """What was added to a message. The first of each choice has the role."""

    model_config = DOCUMENTED

    role: Annotated[Literal["assistant"] | None, Field(exclude_if=is_none)] = None
    content: Annotated[str | None, Field(exclude_if=is_none)] = None


class _Choice(BaseModel):
    model_config = DOCUMENTED

    index: int
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: Annotated[str | int | None, Field(exclude_if=is_none)] = None
    """The stop string or token id of the request that ended the text; null for the model's own end."""
    token_ids: Annotated[list[int] | None, Field(exclude_if=is_none)] = None
    """With `return_token_ids`: the tokens of the text, those that ended it included."""
    timings: Annotated[Timings | None, Field(exclude_if=is_none)] = None
    """With `return_timings`; in a stream in the last chunk of each choice only."""


class ChatChoice(_Choice):
    """One generated message."""

    message: AssistantMessage


class ChunkChoice(_Choice):
    """What was added to one message."""

    delta: Delta


class ChatResponse(BaseModel):
    """The answer to `POST /v1/chat/completions`."""

    model_config = DOCUMENTED

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    """Unix time in seconds."""
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: Annotated[PromptLogprobs | None, Field(exclude_if=is_none)] = None
    """With `prompt_logprobs`."""
    prompt_token_ids: Annotated[list[int] | None, Field(exclude_if=is_none)] = None
    """With `return_token_ids`."""


class ChatChunk(BaseModel):
    """One event of a stream."""

    model_config = DOCUMENTED

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Annotated[Usage | None, Field(exclude_if=is_none)] = None
    prompt_token_ids: Annotated[list[int] | None, Field(exclude_if=is_none)] = None
    """With `return_token_ids`, in the first chunk only."""
