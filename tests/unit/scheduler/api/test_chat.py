"""Chat completions: their prompts, answers and streams, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.api.chat_protocol import ChatChunk, ChatResponse
from scheduler.api.tokenizer import Tokenizer
from tests.unit.scheduler.api.scripted import ScriptedEngine, app_over, chat, events


def prompt_of(tokenizer: Tokenizer, messages: list[dict[str, Any]], **fields: Any) -> str:
    """What the template of the tests, ``u:Hi|a:``, makes of messages."""
    engine = ScriptedEngine(["x"])
    chat(app_over(engine, tokenizer), messages=messages, **fields).raise_for_status()
    return bytes(engine.requests[0].prompt_token_ids).decode()


def test_a_plain_answer(bytes_tokenizer: Tokenizer) -> None:
    answer = chat(app_over(ScriptedEngine(["Hello"]), bytes_tokenizer)).json()
    ChatResponse.model_validate(answer)
    assert answer.pop("id").startswith("chatcmpl-")
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "object": "chat.completion",
        "model": "bytes",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 5,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "prompt_logprobs": None,
    }


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("top_logprobs", [None, 5])
def test_a_stream_joins_to_the_plain_answer(
    bytes_tokenizer: Tokenizer, n: int, top_logprobs: int | None
) -> None:
    fields: dict[str, Any] = {"n": n, "stop": "|"}
    if top_logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": top_logprobs}
    script = ["Bé<end>", "Cz|y"]
    answer = chat(app_over(ScriptedEngine(script), bytes_tokenizer), **fields).json()
    *chunks, usage = events(
        chat(
            app_over(ScriptedEngine(script), bytes_tokenizer),
            stream=True,
            stream_options={"include_usage": True},
            **fields,
        ).text
    )
    seen: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        ChatChunk.model_validate(chunk)
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        if choice["index"] not in seen:
            assert delta == {"role": "assistant", "content": ""}
            seen[choice["index"]] = {"text": "", "logprobs": [], "reasons": []}
            continue
        assert "role" not in delta
        seen[choice["index"]]["text"] += delta["content"]
        if choice["finish_reason"] is not None:
            seen[choice["index"]]["reasons"].append(choice["finish_reason"])
        if top_logprobs is not None:
            seen[choice["index"]]["logprobs"] += choice["logprobs"]["content"]
    assert usage["usage"] == answer["usage"]
    for choice in answer["choices"]:
        streamed = seen[choice["index"]]
        assert streamed["text"] == choice["message"]["content"]
        assert streamed["reasons"] == [choice["finish_reason"]] == ["stop"]
        if top_logprobs is not None:
            assert streamed["logprobs"] == choice["logprobs"]["content"]
            assert {len(entry["top_logprobs"]) for entry in streamed["logprobs"]} == {5}


def test_logprobs(bytes_tokenizer: Tokenizer) -> None:
    app = app_over(ScriptedEngine(["Bé"]), bytes_tokenizer)
    (choice,) = chat(app, logprobs=True, top_logprobs=1).json()["choices"]
    best = {"token": "A", "logprob": -1.0, "bytes": [65]}
    assert choice["logprobs"]["content"] == [
        {"token": "B", "logprob": -2.0, "bytes": [66], "top_logprobs": [best]},
        {"token": "\ufffd", "logprob": -9.5, "bytes": [0xC3], "top_logprobs": [best]},
        {"token": "\ufffd", "logprob": -9.5, "bytes": [0xA9], "top_logprobs": [best]},
    ]


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([("system", "Be"), ("user", "Hi"), ("assistant", "Yo"), ("user", "?")], "s:Be|u:Hi|a:Yo|u:?|a:"),
        ([("developer", "Be"), ("user", "Hi")], "s:Be|u:Hi|a:"),
        ([("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])], "u:a\nb|a:"),
        ([("user", "Hi"), ("assistant", None)], "u:Hi|a:|a:"),
        ([("user", "")], "u:|a:"),
    ],
)
def test_messages_go_through_the_template(
    bytes_tokenizer: Tokenizer, messages: list[tuple[str, Any]], prompt: str
) -> None:
    sent = [{"role": role, "content": content} for role, content in messages]
    assert prompt_of(bytes_tokenizer, sent) == prompt


def test_no_variable_takes_the_place_of_the_conversation(bytes_tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    variables = {"messages": [], "self": 1, "add_generation_prompt": False}
    assert prompt_of(bytes_tokenizer, messages, chat_template_kwargs=variables) == "u:Hi|a:"


def test_the_end_of_the_prompt(bytes_tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert prompt_of(bytes_tokenizer, messages, add_generation_prompt=False) == "u:Hi|"


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        ({}, 57),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
    ],
)
def test_max_tokens(bytes_tokenizer: Tokenizer, fields: dict[str, Any], max_tokens: int) -> None:
    """The context has 64 tokens, and the prompt 7."""
    engine = ScriptedEngine(["x"])
    chat(app_over(engine, bytes_tokenizer), **fields).raise_for_status()
    assert engine.requests[0].sampling.max_tokens == max_tokens


def test_token_ids(bytes_tokenizer: Tokenizer) -> None:
    fields = {"return_token_ids": True, "n": 2}
    answer = chat(app_over(ScriptedEngine(["AB", "C"]), bytes_tokenizer), **fields).json()
    assert bytes(answer["prompt_token_ids"]) == b"u:Hi|a:"
    assert [choice["token_ids"] for choice in answer["choices"]] == [[65, 66], [67]]
    app = app_over(ScriptedEngine(["AB", "C"]), bytes_tokenizer)
    chunks = events(chat(app, stream=True, **fields).text)
    assert [bytes(chunk["prompt_token_ids"]) for chunk in chunks if "prompt_token_ids" in chunk] == [
        b"u:Hi|a:"
    ]
    assert "prompt_token_ids" in chunks[0]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": None}, "messages", "messages must be provided"),
        ({"messages": []}, "messages", "messages must not be empty"),
        ({"messages": "Hi"}, "messages", "messages must be a list, got 'Hi'"),
        (
            {"messages": [{"role": "king", "content": "Hi"}]},
            "messages.0.role",
            "must be 'system', 'developer'",
        ),
        ({"messages": [{"role": "user"}]}, "messages.0", "must have content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "must be a string or a list"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content",
            "parts of type text only, got type 'image_url'",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content", "valid Unicode"),
        (
            {"messages": [{"role": "user", "content": "x" * 5000}]},
            "messages",
            "longer than the model's context",
        ),
        ({"top_logprobs": 3}, "top_logprobs", "only allowed with logprobs true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs must be <= 20, got 21"),
        ({"logprobs": 5}, "logprobs", "logprobs must be true or false, got 5"),
        ({"max_tokens": 100}, "max_tokens", "max_tokens must be <= 57, got 100"),
        (
            {"max_completion_tokens": 100},
            "max_completion_tokens",
            "max_completion_tokens must be <= 57, got 100",
        ),
        ({"tools": [{"type": "function"}]}, "tools", "tools is not supported"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice is not supported"),
        ({"functions": [{}]}, "functions", "functions is not supported"),
        ({"audio": {}}, "audio", "audio is not supported"),
        ({"modalities": ["audio"]}, "modalities", "modalities is not supported"),
        ({"chat_template": "x"}, "chat_template", "chat_template is not supported"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed with stream"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}],
                    }
                ]
            },
            "messages",
            "the arguments of a tool call must be JSON",
        ),
    ],
)
def test_what_is_refused(
    bytes_tokenizer: Tokenizer, fields: dict[str, Any], param: str, message: str
) -> None:
    engine = ScriptedEngine(["x"])
    answer = chat(app_over(engine, bytes_tokenizer), **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
    assert engine.requests == []


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "functions": []},
        {"service_tier": "auto", "store": False, "metadata": {"a": "b"}, "safety_identifier": "x"},
        {"modalities": ["text"], "response_format": {"type": "text"}, "prediction": None},
        {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [{"role": "user", "content": "x" * 5000}], "truncate_prompt_tokens": 8},
    ],
)
def test_what_does_not_change_the_result_is_accepted(
    bytes_tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    assert chat(app_over(ScriptedEngine(["x"]), bytes_tokenizer), **fields).status_code == 200
