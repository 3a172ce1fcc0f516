"""What is refused, with which status, message and field; and what is accepted."""

from __future__ import annotations

from typing import Any

import pytest

from graphs.layout import MAX_BANNED_IDS
from scheduler.api.body import parse_as
from scheduler.api.completion_protocol import CompletionRequest
from scheduler.api.fields import MAX_BANNED_TOKENS
from scheduler.api.tokenizer import Tokenizer
from scheduler.errors import InvalidRequestError, OverloadedError, RequestError, UnavailableError
from scheduler.messages import QueueState
from tests.unit.scheduler.api.scripted import MODEL, ScriptedEngine, app_over, complete, post, send

UNSUPPORTED = {
    "suffix": "x",
    "use_beam_search": True,
    "allowed_token_ids": [1],
    "bad_words": ["x"],
    "guided_regex": "a",
    "regex": "a",
    "json_schema": "{}",
    "ebnf": "a",
    "logits_processors": ["x"],
    "prompt_embeds": ["AA=="],
    "spaces_between_special_tokens": False,
}

# Fields, the field at fault, and what the message says.
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", "must be provided and non-empty"),
    ({"prompt": []}, "prompt", "must be provided and non-empty"),
    ({"prompt": None}, "prompt", "must be provided and non-empty"),
    ({"prompt": ["a", ""]}, "prompt", "prompt 1 is empty"),
    ({"prompt": [[1], []]}, "prompt", "prompt 1 is empty"),
    ({"prompt": 5}, "prompt", "must be a string, a list of strings, a list of token ids"),
    ({"prompt": {"a": 1}}, "prompt", "must be a string"),
    ({"prompt": ["a", 1]}, "prompt", "must be a string"),
    ({"prompt": [1.5]}, "prompt", "must be a string"),
    ({"prompt": [True]}, "prompt", "must be a string"),
    ({"prompt": "\ud800"}, "prompt", "valid Unicode"),
    ({"prompt": ["a"] * 129}, "prompt", "at most 128 prompts, got 129"),
    (
        {"prompt": [1, 300]},
        "prompt",
        "token id 300 at position 1, out of vocabulary: token ids must be >= 0 and < 300",
    ),
    ({"prompt": [-1]}, "prompt", "token id -1 at position 0, out of vocabulary: token ids must be >= 0"),
    ({"prompt": [[1], [999999]]}, "prompt", "prompt 1 holds token id 999999"),
    ({"prompt": [1] * 64}, "prompt", "has 64 tokens, which is longer than the model's context length"),
    ({"prompt": "x" * 100}, "prompt", "has 100 tokens, which is longer than the model's context length"),
    (
        {"prompt": "x" * 5000},
        "prompt",
        "has 5000 characters, which is longer than the model's context length",
    ),
    (
        {"prompt": [1] * 60, "max_tokens": 5},
        "max_tokens",
        "max_tokens must be <= 4, got 5: prompt has 60 tokens",
    ),
    ({"max_tokens": -1}, "max_tokens", "max_tokens must be >= 0, got -1"),
    ({"max_tokens": "ten"}, "max_tokens", "max_tokens must be an integer, got 'ten'"),
    ({"max_tokens": 1.5}, "max_tokens", "max_tokens must be an integer, got 1.5"),
    ({"max_tokens": True}, "max_tokens", "max_tokens must be an integer, got True"),
    ({"min_tokens": -1}, "min_tokens", "min_tokens must be >= 0, got -1"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "min_tokens must be <= max_tokens, which is 4, got 5"),
    ({"priority": 101}, "priority", "priority must be <= 100, got 101"),
    ({"priority": "high"}, "priority", "priority must be an integer, got 'high'"),
    ({"ttft_slo_ms": 0}, "ttft_slo_ms", "ttft_slo_ms must be > 0"),
    ({"user": 5}, "user", "user must be a string, got 5"),
    ({"temperature": -0.1}, "temperature", "temperature must be >= 0.0, got -0.1"),
    ({"temperature": 2.1}, "temperature", "temperature must be <= 2.0, got 2.1"),
    ({"temperature": "hot"}, "temperature", "temperature must be a number, got 'hot'"),
    ({"top_p": -0.1}, "top_p", "top_p must be >= 0.0"),
    ({"top_p": 1.1}, "top_p", "top_p must be <= 1.0"),
    ({"top_k": -2}, "top_k", "top_k must be >= -1, got -2"),
    ({"seed": 2**63}, "seed", "seed must be < 9223372036854775808"),
    ({"seed": "x"}, "seed", "seed must be an integer"),
    ({"n": 0}, "n", "n must be >= 1, got 0"),
    ({"n": 129}, "n", "n must be <= 128, got 129"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "stop must hold at most 4 strings, got 5"),
    ({"stop": ""}, "stop", "stop must not hold an empty string"),
    ({"stop": ["a", ""]}, "stop", "stop must not hold an empty string"),
    ({"stop": 5}, "stop", "stop must be a string or a list of strings"),
    ({"stop": [5]}, "stop", "stop must be a string or a list of strings"),
    ({"stream": "yes"}, "stream", "stream must be true or false, got 'yes'"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed with stream"),
    ({"stream_options": {"include_usage": None}}, "stream_options", "only allowed with stream"),
    ({"stream": True, "stream_options": 5}, "stream_options", "must be an object"),
    (
        {"stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
        "stream_options.include_usage must be true or false, got 1",
    ),
    ({"model": None}, "model", "model must be provided"),
    ({"model": 5}, "model", "model must be a string, got 5"),
    ({"best_of": 2}, "best_of", "best_of is not supported unless it equals n"),
    ({"n": 3, "best_of": 2}, "best_of", "best_of is not supported unless it equals n"),
    ({"min_p": 1.5}, "min_p", "min_p must be <= 1.0, got 1.5"),
    ({"presence_penalty": 2.5}, "presence_penalty", "presence_penalty must be <= 2.0"),
    ({"frequency_penalty": -3}, "frequency_penalty", "frequency_penalty must be >= -2.0"),
    ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty must be > 0.0"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "must have token ids as its keys, got 'x'"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "must have token ids as its keys, got '-1'"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "numbers from -100 to 100 as its values, got 101"),
    ({"logit_bias": {"1": "x"}}, "logit_bias", "numbers from -100 to 100 as its values, got 'x'"),
    ({"logit_bias": [1]}, "logit_bias", "must be an object"),
    ({"logit_bias": {"300": 1}}, "logit_bias", "token id 300 at position 0, out of vocabulary"),
    ({"logit_bias": {str(i): 0 for i in range(301)}}, "logit_bias", "at most 300 tokens, got 301"),
    ({"stop_token_ids": ["x"]}, "stop_token_ids", "must be a list of token ids"),
    ({"stop_token_ids": [300]}, "stop_token_ids", "out of vocabulary"),
    (
        {"stop_token_ids": [*range(16), 15], "min_tokens": 1},
        "stop_token_ids",
        "must hold at most 15 token ids with min_tokens > 0, got 16",
    ),
    ({"logprobs": -1}, "logprobs", "logprobs must be >= 0, got -1"),
    ({"logprobs": 21}, "logprobs", "logprobs must be <= 20, got 21"),
    ({"logprobs": "x"}, "logprobs", "logprobs must be an integer, got 'x'"),
    ({"logprobs": True}, "logprobs", "logprobs must be an integer, got True"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "prompt_logprobs must be >= 0, got -1"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "must be 0 with stream"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must be >= 1, or -1, got 0"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "must be >= -1, got -2"),
    ({"truncation_side": "up"}, "truncation_side", "must be 'left' or 'right', got 'up'"),
    ({"stop": "\ud800"}, "stop", "valid Unicode"),
    ({"stop": ["a", "b" * 1025]}, "stop", "must hold strings of at most 1024 characters, got one of 1025"),
    ({"user": "u" * 513}, "user", "user must have at most 512 characters, got"),
    (
        {"prompt": "x" * (2**20 + 1), "truncate_prompt_tokens": 4},
        "prompt",
        "prompt must have at most 1048576 characters to be cut to truncate_prompt_tokens, got 1048577",
    ),
    (
        {"prompt": ["a"] * 128, "n": 128},
        "n",
        "must hold at most 10000 sequences, the size of the queue, got 16384",
    ),
    (
        {"prompt": [[1] * 10] * 128, "n": 10, "max_tokens": 50, "logprobs": 20},
        "logprobs",
        "logprobs must not ask for more than 1048576 logprobs in one answer, got 1344000",
    ),
    (
        {"prompt": [[1] * 60] * 128, "n": 10, "max_tokens": 4, "prompt_logprobs": 20},
        "prompt_logprobs",
        "must not ask for more than 1048576 logprobs in one answer, got 1612800",
    ),
    ({"request_id": "a b"}, "request_id", "request_id must match"),
    *(({name: value}, name, f"{name} is not supported") for name, value in UNSUPPORTED.items()),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED, ids=lambda value: repr(value)[:40])
def test_a_wrong_field_is_named_with_its_limit(
    bytes_tokenizer: Tokenizer, fields: dict[str, Any], param: str, message: str
) -> None:
    engine = ScriptedEngine()
    answer = complete(app_over(engine, bytes_tokenizer), **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert message in error["message"]
    assert engine.requests == []


@pytest.mark.parametrize("stream", [False, True])
def test_streams_are_refused_before_they_begin(bytes_tokenizer: Tokenizer, stream: bool) -> None:
    answer = complete(app_over(ScriptedEngine(), bytes_tokenizer), prompt=[1] * 64, stream=stream)
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"


def test_an_unknown_model_is_not_found(bytes_tokenizer: Tokenizer) -> None:
    answer = complete(app_over(ScriptedEngine(), bytes_tokenizer), model="gpt-5")
    assert answer.status_code == 404
    assert answer.json()["error"] == {
        "message": "model 'gpt-5' is not served here; served: bytes",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


@pytest.mark.parametrize(
    "body", [b"{", b"", b"\xff", b'{"model": "bytes", "prompt": }', b"[1]", b"5", b'"x"']
)
def test_a_body_that_is_no_json_object(bytes_tokenizer: Tokenizer, body: bytes) -> None:
    answer = post(app_over(ScriptedEngine(), bytes_tokenizer), body)
    assert answer.status_code == 400
    assert "the body" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["temperature", "suffix", "response_format"])
def test_a_body_that_is_nested_too_deeply_to_be_quoted(name: str) -> None:
    value: Any = {}
    for _ in range(100_000):
        value = {"a": value}
    if name == "response_format":
        value = {"type": "json_schema", "json_schema": {"schema": value}}
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        parse_as({"model": "m", "prompt": "a", name: value}, CompletionRequest)


def test_workers_have_room_for_the_end_tokens_that_are_accepted() -> None:
    assert MAX_BANNED_TOKENS == MAX_BANNED_IDS


def test_a_body_without_the_json_content_type(bytes_tokenizer: Tokenizer) -> None:
    app = app_over(ScriptedEngine(), bytes_tokenizer)
    answer = post(app, '{"model": "bytes", "prompt": "Hi"}', "application/x-www-form-urlencoded")
    assert answer.status_code == 400
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_numbers_that_are_not_finite(bytes_tokenizer: Tokenizer, number: str) -> None:
    for field in ("temperature", "max_tokens"):
        body = f'{{"model": "bytes", "prompt": "Hi", "{field}": {number}}}'
        answer = post(app_over(ScriptedEngine(), bytes_tokenizer), body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize(
    "fields",
    [
        {"foo": 1, "user": "me", "length_penalty": 1.2, "cache_salt": "x", "priority": 3, "request_id": "r"},
        {
            "logprobs": None,
            "prompt_logprobs": None,
            "echo": False,
            "suffix": None,
            "best_of": 1,
            "logit_bias": {},
            "presence_penalty": 0,
        },
        {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "min_p": 0.0, "stop_token_ids": []},
        {"n": 2, "best_of": 2},
        {"stop": []},
        {"stream_options": {}},
        {"max_tokens": 4.0, "temperature": 1, "top_p": 0},
        {"prompt": [1] * 63, "max_tokens": 1},
        dict.fromkeys(["max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "n", "stream"]),
    ],
)
def test_what_does_not_change_the_result_is_accepted(
    bytes_tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    answer = complete(app_over(ScriptedEngine(["a", "b"]), bytes_tokenizer), **fields)
    assert answer.status_code == 200, answer.text


def test_text_prompts_need_a_tokenizer() -> None:
    engine = ScriptedEngine(["ab"])
    app = app_over(engine, None)
    refused = complete(app, prompt="Hi")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt"
    assert "has no tokenizer" in refused.json()["error"]["message"]
    answer = complete(app, prompt=[1, 2]).json()
    assert answer["choices"][0]["text"] == ""
    assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
def test_an_overload_says_when_to_come_back(bytes_tokenizer: Tokenizer, stream: bool) -> None:
    engine = ScriptedEngine()
    engine.refusal = OverloadedError("the queue is full", retry_after_s=2.3)
    answer = complete(app_over(engine, bytes_tokenizer), stream=stream)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "3"
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"


def test_a_full_queue_turns_a_prompt_away_before_it_is_tokenised(
    bytes_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def encode(texts: Any) -> Any:
        raise AssertionError("tokenised for nothing")

    monkeypatch.setattr(bytes_tokenizer, "encode", encode)
    engine = ScriptedEngine(["a"])
    full = QueueState(num_requests=10_000, num_tokens=1, requests_per_s=0.5, tokens_per_s=1.0)
    engine.admission.update(full, 0.0)
    answer = complete(app_over(engine, bytes_tokenizer))
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "2"
    assert engine.requests == []


def test_a_permit_ends_with_its_request_whether_that_is_accepted_or_not(bytes_tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(["a", "b"])
    app = app_over(engine, bytes_tokenizer)
    assert complete(app, prompt=["x", "y"]).status_code == 200
    engine.refusal = UnavailableError("draining")
    assert complete(app).status_code == 503
    assert complete(app, prompt=[10**9]).status_code == 400
    assert (engine.admission.num_requests, engine.admission.num_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("refusal", "status"),
    [(UnavailableError("draining"), 503), (RequestError("broken", param="prompt"), 500)],
)
def test_what_the_engine_refuses(bytes_tokenizer: Tokenizer, refusal: RequestError, status: int) -> None:
    engine = ScriptedEngine()
    engine.refusal = refusal
    answer = complete(app_over(engine, bytes_tokenizer))
    assert answer.status_code == status
    assert answer.json()["error"]["message"] == refusal.message
    assert answer.json()["error"]["param"] == refusal.param


def test_unknown_paths_and_methods_have_the_same_error_body(bytes_tokenizer: Tokenizer) -> None:
    app = app_over(ScriptedEngine(), bytes_tokenizer)
    missing, wrong = send(app, "GET", "/v1/nothing"), send(app, "GET", "/v1/completions")
    assert (missing.status_code, wrong.status_code) == (404, 405)
    for answer in (missing, wrong):
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


def test_a_bug_gives_500_and_tells_nothing(bytes_tokenizer: Tokenizer) -> None:
    class BrokenEngine(ScriptedEngine):
        async def submit(self, requests: Any) -> Any:
            raise KeyError("secret detail")

    answer = complete(app_over(BrokenEngine(), bytes_tokenizer))
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "Internal server error"


def test_api_keys(bytes_tokenizer: Tokenizer) -> None:
    app = app_over(ScriptedEngine(["a"]), bytes_tokenizer, api_keys=("first key", "second"))
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "second"},
        {"authorization": "Bearer "},
    ):
        answer = send(app, "GET", "/v1/models", headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    for key in ("first key", "second"):
        assert send(app, "GET", "/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
    assert complete(app).status_code == 401
    assert send(app, "GET", "/health").status_code == 200
    assert send(app, "GET", "/metrics").status_code == 200


def test_health_metrics_and_models(bytes_tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine()
    app = app_over(engine, bytes_tokenizer, model_names=("one", "two"))
    assert send(app, "GET", "/health").status_code == 200
    metrics = send(app, "GET", "/metrics")
    assert metrics.text == "purefill_queue_requests 0\n"
    assert metrics.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert send(app, "HEAD", "/metrics").status_code == 200
    models = send(app, "GET", "/v1/models").json()
    assert models["object"] == "list"
    assert [(card["id"], card["object"], card["max_model_len"]) for card in models["data"]] == [
        ("one", "model", MODEL.max_model_len),
        ("two", "model", MODEL.max_model_len),
    ]
    engine.failure = UnavailableError("the scheduler is not running")
    assert send(app, "GET", "/health").status_code == 503
    assert send(app, "GET", "/metrics").status_code == 503
