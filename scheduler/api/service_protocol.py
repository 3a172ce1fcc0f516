"""The JSON of everything that is neither a completion nor a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from scheduler.api.chat_protocol import ChatPrompt
from scheduler.api.fields import DOCUMENTED, STRICT, Unicode, is_none


class _Body(BaseModel):
    model_config = STRICT

    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}


class TokenizeTextRequest(_Body):
    """The body of `POST /tokenize` for a text."""

    prompt: Unicode
    add_special_tokens: bool = True
    """Whether the text gets the special tokens that the model expects around a prompt."""
    return_token_strs: bool = False


class TokenizeChatRequest(_Body, ChatPrompt):
    """The body of `POST /tokenize` for a conversation."""

    return_token_strs: bool = False


class TokenizeResponse(BaseModel):
    """The answer to `POST /tokenize`."""

    model_config = DOCUMENTED

    count: int
    max_model_len: int
    """Most tokens of prompt and completion together."""
    tokens: list[int]
    token_strs: Annotated[list[str] | None, Field(exclude_if=is_none)] = None
    """With `return_token_strs`: the text of each token."""


class DetokenizeRequest(_Body):
    """The body of `POST /detokenize`."""

    tokens: list[Annotated[int, Field(ge=0)]]
    skip_special_tokens: bool = False
    """Whether special tokens give no text."""


class DetokenizeResponse(BaseModel):
    """The answer to `POST /detokenize`."""

    model_config = DOCUMENTED

    prompt: str


class ModelCard(BaseModel):
    """One served model name."""

    model_config = DOCUMENTED

    id: str
    object: Literal["model"] = "model"
    created: int
    """Unix time in seconds."""
    owned_by: str = "purefill"
    max_model_len: int
    """Most tokens of prompt and completion together."""


class ModelList(BaseModel):
    """The answer to `GET /v1/models`."""

    model_config = DOCUMENTED

    object: Literal["list"] = "list"
    data: list[ModelCard]


class DeletedRequest(BaseModel):
    """The answer to `DELETE /v1/requests/{id}`."""

    model_config = DOCUMENTED

    id: str
    object: Literal["request"] = "request"
    deleted: Literal[True] = True


class LoadResponse(BaseModel):
    """The answer to `GET /load`, of the whole service."""

    model_config = DOCUMENTED

    server_load: int
    """Sequences that have not ended."""
    queue_requests: int
    """Those that wait for their prefill."""
    queue_tokens: int
    """Tokens of those that wait."""


class ActorState(BaseModel):
    """One actor of the service."""

    model_config = DOCUMENTED

    name: str
    """As in Ray's dashboard."""
    pool: Literal["scheduler", "api", "prefill", "decode"]
    state: Literal["ready", "draining", "dead"]
    start_time: float
    """When it began to serve, in seconds since 1970."""


class StatusResponse(BaseModel):
    """The answer to `GET /status`, of the whole service."""

    model_config = DOCUMENTED

    ready: bool
    problem: str | None
    """Why it is not ready."""
    version: str
    model: str
    live_requests: int
    """Sequences that have not ended."""
    queue_requests: int
    """Those that wait for their prefill."""
    queue_tokens: int
    """Tokens of those that wait."""
    actors: list[ActorState]


class ReadyResponse(BaseModel):
    """The answer to `GET /ready`."""

    model_config = DOCUMENTED

    journal: Literal["memory", "up", "down"]
    """Where accepted requests are kept: in memory, or in a journal that can be reached or not."""


class ResetPrefixCacheResponse(BaseModel):
    """The answer to `POST /reset_prefix_cache`."""

    model_config = DOCUMENTED

    num_blocks: int
    """Blocks of tokens that were cached, in all pools."""


class VersionResponse(BaseModel):
    """The answer to `GET /version`."""

    model_config = DOCUMENTED

    version: str


class ErrorInfo(BaseModel):
    """What went wrong. All four fields are always present."""

    model_config = DOCUMENTED

    message: str
    type: str
    param: str | None
    """The field at fault, such as ``max_tokens``."""
    code: str | None


class ErrorResponse(BaseModel):
    """The body of every answer that is not a success."""

    model_config = DOCUMENTED

    error: ErrorInfo
