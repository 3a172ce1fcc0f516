"""The JSON of answers: one renderer for completions and one for chats, each for whole answers and for streams.

Everything is ASCII, as some clients take U+2028 or U+0085 for the end of a line.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from scheduler.api.chat_protocol import ChatRequest
from scheduler.api.completion_protocol import CompletionRequest
from scheduler.api.logprobs import TokenNames, chat_logprobs, completion_logprobs, prompt_logprobs
from scheduler.api.output import Delta, Prompt


class Renderer(Protocol):
    """Writes the answer of one request."""

    def answer(self, choices: Sequence[Delta], usage: dict[str, Any]) -> str:
        """Return the JSON of the whole answer."""

    def chunks(self, delta: Delta, usage: dict[str, Any] | None) -> Sequence[str]:
        """Return the JSON of the events that tell a stream's client of a delta. `usage`: so far, if to be told."""

    def last_chunk(self, usage: dict[str, Any]) -> str:
        """Return the JSON of the event with the usage and no choice."""


class CompletionRenderer:
    """Writes the answer of `/v1/completions`."""

    def __init__(
        self,
        body: CompletionRequest,
        head: dict[str, Any],
        prompts: Sequence[Prompt],
        names: TokenNames,
    ) -> None:
        """`head`: id, created and model. `prompts`: that of each choice."""
        self._body = body
        self._prompts = prompts
        self._names = names
        self._head = _open_object({**head, "object": "text_completion"})

    def answer(self, choices: Sequence[Delta], usage: dict[str, Any]) -> str:
        """Return the JSON of the whole answer."""
        rendered = [self._choice(choice) | self._prompt_logprobs(choice) for choice in choices]
        return f'{self._head}"choices":{_json(rendered)},"usage":{_json(usage)}}}'

    def chunks(self, delta: Delta, usage: dict[str, Any] | None) -> Sequence[str]:
        """Return the JSON of the event for a delta."""
        tail = _usage_tail(usage, include=self._body.include_usage)
        return (f'{self._head}"choices":[{_json(self._choice(delta))}]{tail}',)

    def last_chunk(self, usage: dict[str, Any]) -> str:
        """Return the JSON of the event with the usage and no choice."""
        return f'{self._head}"choices":[],"usage":{_json(usage)}}}'

    def _choice(self, delta: Delta) -> dict[str, Any]:
        body = self._body
        choice: dict[str, Any] = {
            "index": delta.position,
            "text": delta.text,
            "logprobs": None
            if body.logprobs is None
            else completion_logprobs(delta.logprobs, body.logprobs, self._names),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if body.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if delta.is_first:
                choice["prompt_token_ids"] = self._prompts[delta.position].token_ids
        if delta.timings is not None:
            choice["timings"] = delta.timings.model_dump()
        return choice

    def _prompt_logprobs(self, choice: Delta) -> dict[str, Any]:
        return {"prompt_logprobs": _prompt_logprobs(self._body.prompt_logprobs, choice, self._names)}


class ChatRenderer:
    """Writes the answer of `/v1/chat/completions`."""

    def __init__(
        self,
        body: ChatRequest,
        head: dict[str, Any],
        prompts: Sequence[Prompt],
        names: TokenNames,
    ) -> None:
        """`head`: id, created and model. `prompts`: that of each choice."""
        self._body = body
        self._prompt = prompts[0]
        self._names = names
        self._answer_head = _open_object({**head, "object": "chat.completion"})
        self._chunk_head = _open_object({**head, "object": "chat.completion.chunk"})
        self._tells_prompt = body.return_token_ids

    def answer(self, choices: Sequence[Delta], usage: dict[str, Any]) -> str:
        """Return the JSON of the whole answer."""
        rendered = [
            self._choice(choice, "message", {"role": "assistant", "content": choice.text, "refusal": None})
            for choice in choices
        ]
        rest: dict[str, Any] = {"choices": rendered, "usage": usage}
        rest["prompt_logprobs"] = _prompt_logprobs(self._body.prompt_logprobs, choices[0], self._names)
        if self._body.return_token_ids:
            rest["prompt_token_ids"] = self._prompt.token_ids
        return self._answer_head + _json(rest)[1:]

    def chunks(self, delta: Delta, usage: dict[str, Any] | None) -> Sequence[str]:
        """Return the JSON of the events for a delta; before the first of a choice comes one with the role."""
        tail = _usage_tail(usage, include=self._body.include_usage)
        chunk = self._chunk(self._choice(delta, "delta", {"content": delta.text}), tail)
        if not delta.is_first:
            return (chunk,)
        opening = {
            "index": delta.position,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        if self._tells_prompt:
            self._tells_prompt = False
            tail = f',"prompt_token_ids":{_json(self._prompt.token_ids)}{tail}'
        return self._chunk(opening, tail), chunk

    def last_chunk(self, usage: dict[str, Any]) -> str:
        """Return the JSON of the event with the usage and no choice."""
        return f'{self._chunk_head}"choices":[],"usage":{_json(usage)}}}'

    def _chunk(self, choice: dict[str, Any], tail: str) -> str:
        return f'{self._chunk_head}"choices":[{_json(choice)}]{tail}'

    def _choice(self, delta: Delta, name: str, content: dict[str, Any]) -> dict[str, Any]:
        num_top = self._body.num_top_logprobs
        choice: dict[str, Any] = {
            "index": delta.position,
            name: content,
            "logprobs": None if num_top is None else chat_logprobs(delta.logprobs, num_top, self._names),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        if delta.timings is not None:
            choice["timings"] = delta.timings.model_dump()
        return choice


def _prompt_logprobs(asked: int | None, choice: Delta, names: TokenNames) -> Any:
    if asked is None or choice.prompt_logprobs is None:
        return None
    return prompt_logprobs(choice.prompt_logprobs, asked, names)


def _usage_tail(usage: dict[str, Any] | None, *, include: bool) -> str:
    """Return the end of a chunk: `usage` is null in all chunks but the last, or absent from all."""
    if usage is not None:
        return f',"usage":{_json(usage)}}}'
    return ',"usage":null}' if include else "}"


def _open_object(fields: dict[str, Any]) -> str:
    """Return an object's JSON up to where more fields may follow."""
    return _json(fields)[:-1] + ","


_json = json.JSONEncoder(separators=(",", ":"), check_circular=False, allow_nan=False).encode
