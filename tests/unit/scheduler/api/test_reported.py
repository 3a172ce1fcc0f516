"""What answers hold besides text: echoed prompts, logprobs, token ids, usage, and how a text ended."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.api.completion_protocol import CompletionResponse
from scheduler.api.tokenizer import Tokenizer
from tests.unit.scheduler.api.scripted import END, ScriptedEngine, app_over, complete, events


def choices(tokenizer: Tokenizer | None, text: str = "BCx", **fields: Any) -> list[Any]:
    """The choices of a plain answer; checks it against the documented form."""
    answer = complete(app_over(ScriptedEngine([text] * 8), tokenizer), **fields).raise_for_status().json()
    CompletionResponse.model_validate(answer)
    return list(answer["choices"])


def streamed(tokenizer: Tokenizer | None, text: str = "BCx", **fields: Any) -> list[Any]:
    """The chunks of a stream, each checked against the documented form."""
    answer = complete(app_over(ScriptedEngine([text] * 8), tokenizer), stream=True, **fields)
    chunks = events(answer.raise_for_status().text)
    for chunk in chunks:
        CompletionResponse.model_validate(chunk)
    return chunks


def joined_logprobs(chunks: list[Any]) -> dict[str, list[Any]]:
    lists: dict[str, list[Any]] = {}
    for chunk in chunks:
        for name, values in chunk["choices"][0]["logprobs"].items():
            lists.setdefault(name, []).extend(values)
    return lists


def test_logprobs_hold_the_likeliest_and_the_token_itself(bytes_tokenizer: Tokenizer) -> None:
    (choice,) = choices(bytes_tokenizer, logprobs=2)
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 2],
        "token_logprobs": [-2.0, -3.0, -9.5],
        "tokens": ["B", "C", "x"],
        "top_logprobs": [
            {"A": -1.0, "B": -2.0},
            {"A": -1.0, "B": -2.0, "C": -3.0},
            {"A": -1.0, "B": -2.0, "x": -9.5},
        ],
    }


def test_zero_logprobs_are_those_of_the_tokens_themselves(bytes_tokenizer: Tokenizer) -> None:
    (choice,) = choices(bytes_tokenizer, logprobs=0)
    assert choice["logprobs"]["top_logprobs"] == [{"B": -2.0}, {"C": -3.0}, {"x": -9.5}]


@pytest.mark.parametrize("stop", [None, "xyz", "Cx"])
def test_logprobs_of_a_stream_are_those_of_the_plain_answer(
    bytes_tokenizer: Tokenizer, stop: str | None
) -> None:
    """Also where the text lags behind its tokens, as it may become a stop string."""
    fields = {"logprobs": 1, "stop": stop, "echo": True}
    (choice,) = choices(bytes_tokenizer, **fields)
    assert joined_logprobs(streamed(bytes_tokenizer, **fields)) == choice["logprobs"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]


def test_tokens_that_are_no_whole_characters(bytes_tokenizer: Tokenizer) -> None:
    (choice,) = choices(bytes_tokenizer, "aé!", logprobs=0)
    assert choice["logprobs"]["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "!"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2]


def test_tokens_as_ids(bytes_tokenizer: Tokenizer) -> None:
    fields = {"logprobs": 1, "return_tokens_as_token_ids": True, "return_token_ids": True}
    (choice,) = choices(bytes_tokenizer, **fields)
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert choice["logprobs"]["top_logprobs"][0] == {"token_id:65": -1.0, "token_id:66": -2.0}
    assert choices(None, prompt=[1], logprobs=0)[0]["logprobs"]["tokens"][0] == "token_id:66"


@pytest.mark.parametrize("prompt", ["Hé", [*"Hé".encode()], ["Hé", "x"]])
@pytest.mark.parametrize("n", [1, 2])
def test_echo(bytes_tokenizer: Tokenizer, prompt: Any, n: int) -> None:
    texts = [choice["text"] for choice in choices(bytes_tokenizer, prompt=prompt, echo=True, n=n)]
    assert texts == ["HéBCx"] * n + ["xBCx"] * (n if prompt == ["Hé", "x"] else 0)
    seen = dict.fromkeys(range(len(texts)), "")
    for chunk in streamed(bytes_tokenizer, prompt=prompt, echo=True, n=n):
        seen[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert list(seen.values()) == texts


@pytest.mark.parametrize("skip_special_tokens", [False, True])
def test_offsets_count_the_special_tokens_that_a_text_prompt_holds(
    bytes_tokenizer: Tokenizer, skip_special_tokens: bool
) -> None:
    fields = {"echo": True, "logprobs": 0, "skip_special_tokens": skip_special_tokens}
    (choice,) = choices(bytes_tokenizer, prompt="a<end>b", **fields)
    assert choice["text"] == "a<end>bBCx"
    assert choice["logprobs"]["text_offset"] == [0, 1, 6, 7, 8, 9]


@pytest.mark.parametrize("skip_special_tokens", [False, True])
def test_offsets_leave_out_the_special_tokens_that_are_put_before_a_text(
    beginning_tokenizer: Tokenizer, skip_special_tokens: bool
) -> None:
    fields = {"echo": True, "logprobs": 0, "skip_special_tokens": skip_special_tokens}
    (choice,) = choices(beginning_tokenizer, prompt="a<end>", **fields)
    assert choice["text"] == "a<end>BCx"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 6, 7, 8]


def test_echo_with_logprobs_begins_with_those_of_the_prompt(bytes_tokenizer: Tokenizer) -> None:
    (choice,) = choices(bytes_tokenizer, prompt="zBé", echo=True, logprobs=1)
    logprobs = choice["logprobs"]
    assert choice["text"] == "zBéBCx"
    assert logprobs["tokens"] == ["z", "B", "bytes:\\xc3", "bytes:\\xa9", "B", "C", "x"]
    assert logprobs["token_logprobs"] == [None, -2.0, -9.5, -9.5, -2.0, -3.0, -9.5]
    assert logprobs["top_logprobs"][:2] == [None, {"A": -1.0, "B": -2.0}]
    assert logprobs["text_offset"] == [0, 1, 2, 2, 3, 4, 5]


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_asked_for_is_the_prompt_alone(bytes_tokenizer: Tokenizer, stream: bool) -> None:
    """What scores a text: one token is computed, as the model computes no less, and not told of."""
    engine = ScriptedEngine(["B"])
    fields = {"prompt": "zB", "max_tokens": 0, "echo": True, "logprobs": 0}
    answer = complete(app_over(engine, bytes_tokenizer), stream=stream, **fields).raise_for_status()
    (body,) = events(answer.text) if stream else [answer.json()]
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("zB", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0]
    assert engine.requests[0].sampling.max_tokens == 1
    if not stream:
        assert body["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("num", [0, 1, 3])
def test_prompt_logprobs(bytes_tokenizer: Tokenizer, num: int) -> None:
    for choice in choices(bytes_tokenizer, prompt=["zB", "zA"], prompt_logprobs=num):
        first, second = choice["prompt_logprobs"]
        assert first is None
        itself = "66" if choice["index"] == 0 else "65"
        assert second.keys() == {itself} | {str(65 + i) for i in range(num)}
        assert second[itself]["decoded_token"] == chr(int(itself))
        assert second[itself]["rank"] == (int(itself) - 64 if num >= int(itself) - 64 else None)
        assert choice["logprobs"] is None
    assert choices(bytes_tokenizer)[0]["prompt_logprobs"] is None


def test_more_logprobs_of_the_prompt_than_of_the_output(bytes_tokenizer: Tokenizer) -> None:
    (choice,) = choices(bytes_tokenizer, prompt_logprobs=3, logprobs=1)
    assert len(choice["prompt_logprobs"][1]) == 4
    assert choice["logprobs"]["top_logprobs"][0] == {"A": -1.0, "B": -2.0}


@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({"stop": "C"}, "B", "C"),
        ({"stop": ["zz", "C"], "include_stop_str_in_output": True}, "BC", "C"),
        ({"stop_token_ids": [END]}, "BCx", END),
        ({}, "BCx", None),
        ({"stop_token_ids": [END], "skip_special_tokens": False}, "BCx", END),
        (
            {"stop_token_ids": [END], "include_stop_str_in_output": True, "skip_special_tokens": False},
            "BCx<end>",
            END,
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_ended_a_text(
    bytes_tokenizer: Tokenizer, fields: dict[str, Any], text: str, reason: Any, stream: bool
) -> None:
    if stream:
        chunks = streamed(bytes_tokenizer, "BCx<end>", **fields)
        last = chunks[-1]["choices"][0]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
        assert all("stop_reason" not in chunk["choices"][0] for chunk in chunks[:-1])
    else:
        (last,) = choices(bytes_tokenizer, "BCx<end>", **fields)
        assert last["text"] == text
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", reason)


def test_stop_tokens_reach_the_engine_with_those_of_the_model(bytes_tokenizer: Tokenizer) -> None:
    for ignore_eos, expected in ((False, (END, 5)), (True, (5,))):
        engine = ScriptedEngine(["x"])
        complete(app_over(engine, bytes_tokenizer), stop_token_ids=[5], ignore_eos=ignore_eos)
        assert engine.requests[0].sampling.stop_token_ids == expected


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 4}, "efgh"),
        ({"truncate_prompt_tokens": 4, "truncation_side": "left"}, "efgh"),
        ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, "abcd"),
        ({"truncate_prompt_tokens": 100}, "abcdefgh"),
        ({"truncate_prompt_tokens": -1}, "abcdefgh"),
        ({"truncate_prompt_tokens": 4, "prompt": [*b"abcdefgh"]}, "efgh"),
        ({"truncate_prompt_tokens": -1, "prompt": "y" * 900 + "z" * 54, "max_tokens": 10}, "z" * 54),
    ],
)
def test_truncation(bytes_tokenizer: Tokenizer, fields: dict[str, Any], kept: str) -> None:
    (choice,) = choices(
        bytes_tokenizer, **{"prompt": "abcdefgh", "return_token_ids": True, "echo": True} | fields
    )
    assert bytes(choice["prompt_token_ids"]).decode() == kept
    assert choice["text"] == kept + "BCx"


def test_usage_in_every_chunk(bytes_tokenizer: Tokenizer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = streamed(bytes_tokenizer, stream_options=options, n=2)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 5, 6]
    assert last["choices"] == []
    assert last["usage"] == chunks[-1]["usage"]
    assert last["usage"]["total_tokens"] == 8


@pytest.mark.parametrize("continuous", [None, False, True])
@pytest.mark.parametrize("include", [None, False])
def test_usage_in_no_chunk(bytes_tokenizer: Tokenizer, include: bool | None, continuous: bool | None) -> None:
    options = {"include_usage": include, "continuous_usage_stats": continuous}
    assert all("usage" not in chunk for chunk in streamed(bytes_tokenizer, stream_options=options))


def test_special_tokens_have_text_if_asked(bytes_tokenizer: Tokenizer) -> None:
    fields = {"prompt": [65, END], "echo": True}
    assert choices(bytes_tokenizer, **fields)[0]["text"] == "ABCx"
    assert choices(bytes_tokenizer, skip_special_tokens=False, **fields)[0]["text"] == "A<end>BCx"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 5])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("prompt", ["Hi", ["Hi", "You"], [72, 105], [[72, 105], [89, 111, 117]]])
def test_all_combinations(
    bytes_tokenizer: Tokenizer, stream: bool, echo: bool, logprobs: int | None, n: int, prompt: Any
) -> None:
    texts = ["Hi"] if prompt in ("Hi", [72, 105]) else ["Hi", "You"]
    fields = {"prompt": prompt, "n": n, "logprobs": logprobs, "echo": echo}
    app = app_over(ScriptedEngine(["BCx"] * 4), bytes_tokenizer)
    if stream:
        answer = complete(app, stream=True, stream_options={"include_usage": True}, **fields)
        *chunks, last = events(answer.raise_for_status().text)
        usage, parts = last["usage"], [chunk["choices"][0] for chunk in chunks]
    else:
        body = complete(app, **fields).raise_for_status().json()
        usage, parts = body["usage"], body["choices"]
    whole = dict.fromkeys(range(len(texts) * n), "")
    tops: dict[int, list[Any]] = {index: [] for index in whole}
    for part in parts:
        whole[part["index"]] += part["text"]
        tops[part["index"]] += part["logprobs"]["top_logprobs"] if part["logprobs"] else []
    assert list(whole.values()) == [text * echo + "BCx" for text in texts for _ in range(n)]
    assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["length"] * len(whole)
    assert usage["prompt_tokens"] == sum(map(len, texts))
    for index, entries in tops.items():
        num_echoed = len(texts[index // n]) if echo else 0
        assert len(entries) == (0 if logprobs is None else 3 + num_echoed)
        assert all(entry is None or 5 <= len(entry) <= 6 for entry in entries)
        assert [entry is None for entry in entries] == [i == 0 and echo for i in range(len(entries))]
