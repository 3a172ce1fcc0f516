"""Everything around the completions: tokens, models, readiness, limits, ids, keys, the schema."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from typing import Any

import httpx
import jsonschema
import pytest

from scheduler.api.app import AppSettings, create_app, metrics_app
from scheduler.api.auth import key_digest
from scheduler.api.sse import until_disconnect
from scheduler.api.tokenizer import Tokenizer
from scheduler.errors import OverloadedError, RequestCancelledError, UnavailableError
from scheduler.messages import Request, TokenEvent, TokenEvents
from scheduler.observe import catalogue
from scheduler.observe.registry import Registry
from tests.support.data import shared_file
from tests.unit.scheduler.api.scripted import (
    END,
    MODEL,
    ScriptedEngine,
    app_over,
    complete,
    events,
    post,
    send,
)
from tests.unit.scheduler.api.test_completions import Client


def test_tokenize_and_detokenize(bytes_tokenizer: Tokenizer) -> None:
    app = app_over(ScriptedEngine(), bytes_tokenizer)
    answer = send(app, "POST", "/tokenize", json={"prompt": "aé<end>", "return_token_strs": True}).json()
    assert answer == {
        "count": 4,
        "max_model_len": MODEL.max_model_len,
        "tokens": [97, 0xC3, 0xA9, END],
        "token_strs": ["a", "\ufffd", "\ufffd", "<end>"],
    }
    for skip, text in ((False, "aé<end>"), (True, "aé")):
        body = {"model": "bytes", "tokens": answer["tokens"], "skip_special_tokens": skip}
        assert send(app, "POST", "/detokenize", json=body).json() == {"prompt": text}
    chat = {"messages": [{"role": "user", "content": "x" * 10_000}]}
    answer = send(app, "POST", "/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()
    assert bytes(answer["tokens"]) == b"u:Hi|a:"
    assert send(app, "POST", "/tokenize", json=chat).status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "x"}, 404, "model"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", [], 400, None),
        ("/tokenize", {"prompt": "x" * 400}, 400, "prompt"),
        ("/detokenize", {"tokens": [1] * 65}, 400, "tokens"),
        ("/detokenize", {"tokens": [300]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
    ],
)
def test_what_the_tokenizer_refuses(
    bytes_tokenizer: Tokenizer, path: str, body: Any, status: int, param: str | None
) -> None:
    answer = send(app_over(ScriptedEngine(), bytes_tokenizer), "POST", path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_models_by_name(bytes_tokenizer: Tokenizer) -> None:
    app = app_over(ScriptedEngine(), bytes_tokenizer, model_names=("one", "org/two"))
    assert send(app, "GET", "/v1/models/org/two").json()["id"] == "org/two"
    missing = send(app, "GET", "/v1/models/three")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_readiness_load_and_version(bytes_tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine()
    app = app_over(engine, bytes_tokenizer)
    assert send(app, "GET", "/ready").status_code == 200
    assert send(app, "GET", "/load").json() == {"server_load": 3, "queue_requests": 2, "queue_tokens": 50}
    assert send(app, "GET", "/version").json()["version"]
    engine.failure = UnavailableError("prefill-0 died")
    answer = send(app, "GET", "/ready")
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "prefill-0 died")


@pytest.mark.parametrize("given", ["abc-1", "x" * 128, "x" * 129, "a b", "", "é", None])
def test_request_ids(bytes_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, given: str | None) -> None:
    """A client's own comes back, unless it does not fit into a line; every answer and log line has one."""
    caplog.set_level(logging.INFO, logger="scheduler.api")
    headers = {} if given is None else {"x-request-id": given.encode()}
    app = app_over(ScriptedEngine(["a", "b"]), bytes_tokenizer, api_keys=("key",))
    for key, status in (("wrong", 401), ("key", 404)):
        answer = send(
            app, "GET", "/v1/nothing", headers={"authorization": f"Bearer {key}".encode(), **headers}
        )
        returned = answer.headers["x-request-id"]
        assert answer.status_code == status
        assert returned == given if given in ("abc-1", "x" * 128) else len(returned) == 32
    assert "GET /v1/nothing 404" in caplog.text
    send(app, "GET", "/v1/a%0Ab", headers=headers)
    assert "GET /v1/a%0Ab 401" in caplog.text
    assert "wrong" not in caplog.text
    assert "key" not in caplog.text.replace("api_key", "")


def test_the_log_tells_which_answer_a_request_got(
    bytes_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="scheduler.api")
    answer = complete(app_over(ScriptedEngine(["a"]), bytes_tokenizer)).json()
    assert re.search(f"POST /v1/completions 200 [0-9.]+ s {answer['id']}", caplog.text)


def test_the_log_tells_where_time_went_and_nothing_of_prompts(
    bytes_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="scheduler.api")
    engine = ScriptedEngine(["abc", "abc"])
    complete(app_over(engine, bytes_tokenizer), prompt="secret words", stream=True)
    (record,) = caplog.records
    assert re.search(
        "length, 12 \\+ 3 tokens, queued 0.000 s, .*first token after 0.[0-9]+ s", record.message
    )
    fields: dict[str, Any] = record.fields  # type: ignore[attr-defined]
    assert (fields["status"], fields["outcome"], fields["output_tokens"]) == (200, "length", 3)
    assert "secret" not in caplog.text
    complete(app_over(engine, bytes_tokenizer, log_prompts=True), prompt="secret\nwords")
    assert '"prompt": ["secret\\nwords"]' in caplog.text


def test_what_is_counted_of_requests(bytes_tokenizer: Tokenizer) -> None:
    """Of those that are refused, the reason; of those that fail later, when they ended."""
    registry, engine = Registry(), ScriptedEngine(["ab", "cd", ""], errors={2: ("worker_failed", "it broke")})
    settings = AppSettings(model_names=(MODEL.name,), api_keys=(key_digest("key"),))
    app = create_app(engine, bytes_tokenizer, settings, registry=registry)

    def post(code: int, key: str = "key", **fields: Any) -> None:
        body = {"model": MODEL.name, "prompt": "Hi", **fields}
        headers = {"authorization": f"Bearer {key}"}
        answer = send(app, "POST", "/v1/completions", json=body, headers=headers)
        assert answer.status_code == code

    post(200, n=2)
    post(500)
    post(401, key="wrong")
    post(400, max_tokens=-1)
    post(404, model="other")
    engine.refusal = OverloadedError("full")
    post(429)
    assert send(app, "GET", "/v1/secret-path").status_code == 401
    reasons = ("authentication", "invalid", "model_not_found", "overloaded")
    assert registry.values(catalogue.REJECTIONS) == {(reason,): 1 for reason in reasons}
    assert registry.values(catalogue.PROMPT_TOKENS) == {(): 6}
    codes = registry.values(catalogue.HTTP_REQUESTS)
    assert codes["other", "401"] == 2
    assert codes["/v1/completions", "200"] == codes["/v1/completions", "429"] == 1
    histograms = registry.figures().histograms
    assert sum(histograms[catalogue.TIME_TO_FIRST_TOKEN.name][()][1:]) == 2
    assert sum(histograms[catalogue.INTER_TOKEN.name][()][1:]) == 2
    assert sum(histograms[catalogue.REQUEST_SECONDS.name][()][1:]) == 3


def test_status(bytes_tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine()
    app = app_over(engine, bytes_tokenizer)
    status = send(app, "GET", "/status").json()
    assert (status["ready"], status["queue_requests"], status["model"]) == (True, 2, MODEL.name)
    assert status["actors"] == [
        {"name": "scheduler", "pool": "scheduler", "state": "ready", "start_time": 1.5}
    ]
    engine.failure = UnavailableError("prefill-0 died")
    status = send(app, "GET", "/status").json()
    assert (status["ready"], status["problem"]) == (False, "prefill-0 died")


def test_metrics_at_a_port_of_their_own(bytes_tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine()
    assert send(app_over(engine, bytes_tokenizer, serves_metrics=False), "GET", "/metrics").status_code == 404
    alone = metrics_app(engine)
    assert send(alone, "GET", "/metrics").text == "purefill_queue_requests 0\n"
    assert send(alone, "GET", "/v1/models").status_code == 404
    engine.failure = UnavailableError("the scheduler is not running")
    assert send(alone, "GET", "/metrics").status_code == 503


def test_bodies_that_are_too_large(bytes_tokenizer: Tokenizer) -> None:
    app = app_over(ScriptedEngine(["a"] * 4), bytes_tokenizer, max_body_bytes=200)
    assert complete(app, user="x" * 100).status_code == 200

    async def parts() -> Any:
        for _ in range(10**6):  # never read to its end
            yield b" " * 100

    declared = complete(app, user="x" * 200)
    streamed = send(
        app, "POST", "/v1/completions", content=parts(), headers={"content-type": "application/json"}
    )
    for answer in (declared, streamed):
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"
        assert "at most 200 bytes" in answer.json()["error"]["message"]


def test_nobody_sends_a_body_without_a_key(bytes_tokenizer: Tokenizer) -> None:
    async def parts() -> Any:
        raise AssertionError("the body was read")
        yield b""

    app = app_over(ScriptedEngine(), bytes_tokenizer, api_keys=("key",))
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        assert send(app, "POST", path, content=parts()).status_code == 401


@pytest.mark.parametrize("body", ["[" * 100_000, '{"a":' * 50_000, "1" * 10_000, '{"model": "bytes"}x'])
def test_bodies_that_break_parsers(bytes_tokenizer: Tokenizer, body: str) -> None:
    answer = post(app_over(ScriptedEngine(), bytes_tokenizer), body)
    assert answer.status_code == 400
    assert "the body is not valid JSON" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long(bytes_tokenizer: Tokenizer, stream: bool) -> None:
    engine = ScriptedEngine()
    answer = complete(app_over(engine, bytes_tokenizer, request_timeout_s=0.01), stream=stream)
    if stream:
        error, done, _ = answer.text.split("\n\n")
        assert done == "data: [DONE]"
        body = json.loads(error.removeprefix("data: "))
    else:
        assert answer.status_code == 504
        body = answer.json()
    assert body["error"]["code"] == "request_timeout"
    assert engine.cancelled == [engine.requests[0].request_id]


def test_a_silent_stream_sends_comments(bytes_tokenizer: Tokenizer) -> None:
    async def run() -> None:
        engine = ScriptedEngine()
        client = Client(app_over(engine, bytes_tokenizer, keep_alive_s=0.001), stream=True)
        await engine.submitted.wait()
        await client.sent.get()  # the headers
        for _ in range(3):
            assert (await client.sent.get())["body"] == b": keep-alive\n\n"
        engine.send(engine.requests[0].request_id, b"a", finish_reason="length")
        assert b"data: [DONE]" in await client.body()

    asyncio.run(asyncio.wait_for(run(), timeout=60))


def test_web_pages_of_other_origins(bytes_tokenizer: Tokenizer) -> None:
    headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
    closed = app_over(ScriptedEngine(), bytes_tokenizer, api_keys=("key",))
    open_app = app_over(
        ScriptedEngine(), bytes_tokenizer, api_keys=("key",), cors_origins=("https://a.example",)
    )
    assert (
        "access-control-allow-origin"
        not in send(closed, "OPTIONS", "/v1/completions", headers=headers).headers
    )
    answer = send(open_app, "OPTIONS", "/v1/completions", headers=headers)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    # Pages must be able to read errors too.
    refused = send(open_app, "POST", "/v1/completions", headers=headers)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://a.example"


def test_the_schema_of_the_requests(bytes_tokenizer: Tokenizer) -> None:
    """It takes what the service takes, and says what each field is."""
    app = app_over(ScriptedEngine(), bytes_tokenizer, api_keys=("key",))
    schema = send(app, "GET", "/openapi.json").json()
    jsonschema.Draft202012Validator.check_schema(schema["components"]["schemas"]["CompletionRequest"])
    for path, name in (("/v1/completions", "CompletionRequest"), ("/v1/chat/completions", "ChatRequest")):
        body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": f"#/components/schemas/{name}"}
        fields = schema["components"]["schemas"][name]["properties"]
        assert fields["min_p"]["description"].startswith("Tokens less likely")
    validator = jsonschema.Draft202012Validator(
        {"$ref": "#/components/schemas/CompletionRequest", "components": schema["components"]}
    )
    good: list[dict[str, Any]] = [
        {"prompt": [[1, 2], [3]], "logit_bias": {"5": -100}, "stop": ["a"], "logprobs": 20},
        {"prompt": "a", "max_tokens": None, "structured_outputs": {"json": {"type": "object"}}, "foo": 1},
    ]
    bad: list[dict[str, Any]] = [{"prompt": []}, {"prompt": "a", "logprobs": 21}, {"prompt": "a", "stop": ""}]
    assert all(validator.is_valid({"model": "m", **fields}) for fields in good)
    assert not any(validator.is_valid({"model": "m", **fields}) for fields in bad)
    references = json.dumps(schema).split('"#/components/schemas/')[1:]
    assert {part.split('"')[0] for part in references} <= schema["components"]["schemas"].keys()


def test_the_page_that_shows_the_schema(bytes_tokenizer: Tokenizer) -> None:
    page = send(app_over(ScriptedEngine(), bytes_tokenizer), "GET", "/docs")
    assert page.headers["content-type"].startswith("text/html")
    for text in ("POST /v1/chat/completions", "<code>repetition_penalty</code>", "max_completion_tokens"):
        assert text in page.text
    assert re.search(r"(>[A-Za-z]+</a>) or <a [^>]*\1", page.text) is None  # nothing twice
    assert "http://" not in page.text
    assert "https://" not in page.text


def test_answers_fit_openais_schema(bytes_tokenizer: Tokenizer) -> None:
    schema = json.loads(shared_file("data", "openai_openapi_completions_subset.json").read_text())
    ours = complete(app_over(ScriptedEngine(["ab", "cd"]), bytes_tokenizer), n=2, logprobs=2).json()
    validator = jsonschema.Draft202012Validator(
        {**schema, "$ref": "#/components/schemas/CreateCompletionResponse"}
    )
    assert [error.message for error in validator.iter_errors(ours)] == []


def test_200_clients_that_leave_at_random_moments(bytes_tokenizer: Tokenizer) -> None:
    """Whatever was said to them, everything that had not ended is cancelled, and nothing is kept."""

    async def run() -> None:
        engine = ScriptedEngine()
        app = app_over(engine, bytes_tokenizer)
        clients = [Client(app, stream=i % 3 > 0, n=1 + i % 2, stop=["zz"]) for i in range(200)]
        for i, client in enumerate(clients):
            for _ in range(i % 7):
                await asyncio.sleep(0)  # some leave before they are submitted
            if i % 5 == 0 and engine.requests:
                _give_each_a_token(engine, engine.requests[i % len(engine.requests) :])
            client.leave()
        await asyncio.gather(*(client.task for client in clients), return_exceptions=True)
        assert len(engine.router) == 0
        assert set(engine.cancelled) == {request.request_id for request in engine.requests}
        assert (engine.admission.num_requests, engine.admission.num_tokens) == (0, 0)

    asyncio.run(asyncio.wait_for(run(), timeout=60))


def _give_each_a_token(engine: ScriptedEngine, requests: list[Request]) -> None:
    tokens = tuple(TokenEvent(request_id=request.request_id, index=0, token_id=97) for request in requests)
    engine.router.deliver(TokenEvents(source="decode-0", events=tokens))


def test_work_ends_with_the_connection() -> None:
    async def run() -> None:
        async def receive() -> Any:
            return {"type": "http.disconnect"}

        with pytest.raises(RequestCancelledError):
            await until_disconnect(receive, asyncio.sleep(60))

    asyncio.run(asyncio.wait_for(run(), timeout=30))


def test_a_stream_of_a_real_client_library(bytes_tokenizer: Tokenizer) -> None:
    """U+2028 and its like must not end a line of an event."""

    async def run() -> str:
        app = app_over(ScriptedEngine(["a\u2028b\u0085\r\nc"]), bytes_tokenizer)
        transport = httpx.ASGITransport(app)
        body = {"model": "bytes", "prompt": "Hi", "stream": True, "max_tokens": 20}
        text = ""
        async with (
            httpx.AsyncClient(transport=transport, base_url="http://purefill") as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        return text

    assert asyncio.run(run()) == "a\u2028b\u0085\r\nc"


@pytest.mark.parametrize(
    "fields",
    [
        {
            "ignore_eos": True,
            "stop": None,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
        {
            "prompt": [1, 2, 3],
            "repetition_penalty": 1.0,
            "logprobs": None,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        },
        {"min_tokens": 16, "ignore_eos": True, "stream_options": {"include_usage": True}},
    ],
    ids=["guidellm", "vllm bench", "aiperf"],
)
def test_what_load_generators_send(bytes_tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    app = app_over(ScriptedEngine(["x" * 16]), bytes_tokenizer)
    *chunks, last = events(complete(app, max_tokens=16, stream=True, **fields).raise_for_status().text)
    assert len(chunks) == 16
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 16


def test_the_prefix_cache_is_reset_by_those_who_have_a_key(bytes_tokenizer: Tokenizer) -> None:
    app = app_over(ScriptedEngine(), bytes_tokenizer, api_keys=("secret",))
    assert send(app, "POST", "/reset_prefix_cache").status_code == 401
    headers = {"Authorization": "Bearer secret"}
    answer = send(app, "POST", "/reset_prefix_cache", headers=headers)
    assert (answer.status_code, answer.json()) == (200, {"num_blocks": 7})
