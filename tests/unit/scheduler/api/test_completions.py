"""Plain and streamed answers: their shape, their text, what is sent to the engine, and how they end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import ASGIApp

from scheduler.api.sequences import choice_seed
from scheduler.api.tokenizer import Tokenizer
from scheduler.messages import SamplingParams
from tests.unit.scheduler.api.scripted import END, ScriptedEngine, app_over, complete, events, send

STREAM_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def stream_of(app: ASGIApp, **fields: Any) -> list[Any]:
    answer = complete(app, stream=True, **fields)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events(answer.text)


def ended(chunks: Sequence[Any]) -> dict[int, tuple[str, str]]:
    """Text and finish reason of each choice of a stream; checks that each ends once, in its last chunk."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            index = choice["index"]
            assert index not in reasons
            texts[index] = texts.get(index, "") + choice["text"]
            if choice["finish_reason"] is not None:
                reasons[index] = choice["finish_reason"]
    return {index: (text, reasons[index]) for index, text in texts.items()}


def test_a_plain_answer(bytes_tokenizer: Tokenizer) -> None:
    answer = complete(app_over(ScriptedEngine(["Hello"]), bytes_tokenizer)).json()
    assert answer.pop("id").startswith("cmpl-")
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "object": "text_completion",
        "model": "bytes",
        "choices": [
            {
                "index": 0,
                "text": "Hello",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
                "prompt_logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 5,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_a_stream_has_a_chunk_for_each_token_and_no_usage(bytes_tokenizer: Tokenizer) -> None:
    chunks = stream_of(app_over(ScriptedEngine(["abc"]), bytes_tokenizer))
    assert len({chunk.pop("id") for chunk in chunks}) == 1
    assert len({chunk.pop("created") for chunk in chunks}) == 1
    assert chunks == [
        {
            "object": "text_completion",
            "model": "bytes",
            "choices": [
                {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
                | ({"stop_reason": None} if reason else {})
            ],
        }
        for text, reason in [("a", None), ("b", None), ("c", "length")]
    ]


def test_include_usage_adds_a_last_chunk(bytes_tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(["abc", "de<end>"])
    chunks = events(complete(app_over(engine, bytes_tokenizer), n=2, **STREAM_USAGE).text)
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 6
    assert chunks[-1]["choices"] == []
    assert (
        chunks[-1]["usage"].items() >= {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}.items()
    )


def test_choices_are_prompt_major_and_prompts_count_once(bytes_tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(["a0", "a1", "b0", "b1"])
    answer = complete(app_over(engine, bytes_tokenizer), prompt=["a", "bbb"], n=2).json()
    assert [choice["text"] for choice in answer["choices"]] == ["a0", "a1", "b0", "b1"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 4
    assert [bytes(request.prompt_token_ids) for request in engine.requests] == [b"a", b"a", b"bbb", b"bbb"]
    assert len({request.request_id for request in engine.requests}) == 4


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi", [(72, 105)]),
        (["H", "i"], [(72,), (105,)]),
        ([1, 2], [(1, 2)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
        ("é", [(0xC3, 0xA9)]),
    ],
)
def test_every_form_of_prompt(
    bytes_tokenizer: Tokenizer, prompt: Any, expected: list[tuple[int, ...]]
) -> None:
    engine = ScriptedEngine(["x", "y"])
    assert complete(app_over(engine, bytes_tokenizer), prompt=prompt).status_code == 200
    assert [request.prompt_token_ids for request in engine.requests] == expected


def submitted(tokenizer: Tokenizer, **fields: Any) -> list[SamplingParams]:
    engine = ScriptedEngine(["x"] * 8)
    assert complete(app_over(engine, tokenizer), **fields).status_code == 200
    assert {request.api_server for request in engine.requests} == {engine.name}
    return [request.sampling for request in engine.requests]


def test_sampling_parameters_reach_the_engine(bytes_tokenizer: Tokenizer) -> None:
    fields = {"max_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 42}
    assert submitted(bytes_tokenizer, **fields) == [SamplingParams(**fields, stop_token_ids=(END,))]


def test_class_deadline_and_tenant_reach_the_engine(bytes_tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(["x"] * 4)
    app = app_over(engine, bytes_tokenizer, api_keys=("key-1", "key-2"))
    for key, user in (("key-1", "ann"), ("key-1", "bob"), ("key-2", "ann"), ("key-1", "ann")):
        headers = {"Authorization": f"Bearer {key}"}
        body = {"model": "bytes", "prompt": "Hi", "priority": -1, "ttft_slo_ms": 250, "user": user}
        send(app, "POST", "/v1/completions", json=body, headers=headers).raise_for_status()
    assert {(request.priority, request.ttft_slo_s) for request in engine.requests} == {(-1, 0.25)}
    tenants = [request.tenant for request in engine.requests]
    assert tenants[0] == tenants[3]
    assert len(set(tenants)) == 3
    assert not any("key-1" in tenant for tenant in tenants)


def test_defaults(bytes_tokenizer: Tokenizer) -> None:
    (sampling,) = submitted(bytes_tokenizer, max_tokens=None)
    assert sampling == SamplingParams(max_tokens=16, seed=sampling.seed, stop_token_ids=(END,))
    assert submitted(bytes_tokenizer, ignore_eos=True)[0].stop_token_ids == ()
    assert submitted(bytes_tokenizer, top_k=-1)[0].top_k == 0
    assert submitted(bytes_tokenizer, top_k=10**6)[0].top_k == 300


def test_the_default_of_max_tokens_shrinks_to_the_context(bytes_tokenizer: Tokenizer) -> None:
    assert submitted(bytes_tokenizer, prompt=[1] * 60)[0].max_tokens == 4


def test_seeds(bytes_tokenizer: Tokenizer) -> None:
    def seeds(**fields: Any) -> list[int]:
        return [sampling.seed for sampling in submitted(bytes_tokenizer, **fields)]

    assert seeds(seed=42) == [42]
    three = seeds(seed=42, n=3)
    assert three[0] == 42
    assert len(set(three)) == 3
    assert seeds(seed=42, n=3) == three
    assert seeds(seed=42, n=3, prompt=["a", "b"]) == three + three
    assert len(set(seeds(n=4, prompt=["a", "a"]))) == 8


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 127))
def test_a_seed_is_in_range_and_repeatable(seed: int, choice: int) -> None:
    assert 0 <= choice_seed(seed, choice) < 2**63
    assert choice_seed(seed, choice) == choice_seed(seed, choice)


SHARED: dict[str, tuple[ScriptedEngine, ASGIApp]] = {}
"""An application takes longer to make than a hundred requests."""
TEXTS = st.text(alphabet="ab\n\u2028é🦩", max_size=10).filter(bool)


@given(
    texts=st.lists(st.tuples(TEXTS, st.booleans()), min_size=1, max_size=3),
    stops=st.lists(st.text(alphabet="ab\né", min_size=1, max_size=3), max_size=4),
    min_tokens=st.integers(0, 4),
)
def test_plain_and_streamed_answers_agree(
    bytes_tokenizer: Tokenizer, texts: list[tuple[str, bool]], stops: list[str], min_tokens: int
) -> None:
    if "app" not in SHARED:
        engine = ScriptedEngine()
        SHARED["app"] = engine, app_over(engine, bytes_tokenizer)
    engine, app = SHARED["app"]
    script = [text + "<end>" * stopped for text, stopped in texts]
    fields = {"n": len(script), "stop": stops, "min_tokens": min_tokens}
    engine.restart(script)
    answer = complete(app, **fields).json()
    engine.restart(script)
    *chunks, usage = events(complete(app, **fields, **STREAM_USAGE).text)
    assert usage["usage"] == answer["usage"]
    assert ended(chunks) == {
        choice["index"]: (choice["text"], choice["finish_reason"]) for choice in answer["choices"]
    }
    for choice, (text, stopped) in zip(answer["choices"], texts, strict=True):
        if choice["text"] == text:
            assert choice["finish_reason"] == ("stop" if stopped else "length")
        else:
            assert text.startswith(choice["text"])
            assert any(text[len(choice["text"]) :].startswith(stop) for stop in stops)
            assert choice["finish_reason"] == "stop"


def test_return_token_ids(bytes_tokenizer: Tokenizer) -> None:
    script, fields = ["é<end>", "abc"], {"n": 2, "return_token_ids": True}
    answer = complete(app_over(ScriptedEngine(script), bytes_tokenizer), **fields).json()
    expected = [[0xC3, 0xA9, END], [*b"abc"]]
    assert [choice["token_ids"] for choice in answer["choices"]] == expected
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[*b"Hi"], [*b"Hi"]]
    streamed: list[list[int]] = [[], []]
    with_prompt = []
    for chunk in stream_of(app_over(ScriptedEngine(script), bytes_tokenizer), **fields):
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice["token_ids"]
        if "prompt_token_ids" in choice:
            with_prompt.append((choice["index"], choice["prompt_token_ids"]))
    assert streamed == expected
    assert sorted(with_prompt) == [(0, [*b"Hi"]), (1, [*b"Hi"])]


def test_a_stop_string_ends_the_request_in_the_engine(bytes_tokenizer: Tokenizer) -> None:
    async def run() -> None:
        engine = ScriptedEngine()
        client = Client(app_over(engine, bytes_tokenizer), stop=["STOP"], max_tokens=60)
        await engine.submitted.wait()
        (request,) = engine.requests
        engine.send(request.request_id, b"Go on, STOP it")
        answer = json.loads(await client.body())
        assert answer["choices"][0]["text"] == "Go on, "
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == len("Go on, STOP")
        assert engine.cancelled == [request.request_id]

    asyncio.run(asyncio.wait_for(run(), timeout=60))


def test_no_part_of_a_stop_string_leaves_the_server(bytes_tokenizer: Tokenizer) -> None:
    chunks = stream_of(app_over(ScriptedEngine(["xaaab", "xaaay"]), bytes_tokenizer), n=2, stop="aab")
    assert ended(chunks) == {0: ("xa", "stop"), 1: ("xaaay", "length")}
    seen = ""
    for chunk in chunks:
        if chunk["choices"][0]["index"] == 0:
            seen += chunk["choices"][0]["text"]
            assert "xa".startswith(seen)


@pytest.mark.parametrize(
    ("min_tokens", "text"), [(0, ""), (1, ""), (2, "ab"), (3, "ab"), (4, "abab"), (5, "abab"), (6, "ababa")]
)
def test_a_stop_string_counts_from_min_tokens_on(
    bytes_tokenizer: Tokenizer, min_tokens: int, text: str
) -> None:
    """The stop string "a" is complete with tokens 1, 3 and 5."""
    engine = ScriptedEngine(["ababa<end>"])
    answer = complete(app_over(engine, bytes_tokenizer), stop="a", min_tokens=min_tokens).json()
    assert answer["choices"][0]["text"] == text


def test_the_end_token_counts_but_has_no_text(bytes_tokenizer: Tokenizer) -> None:
    answer = complete(app_over(ScriptedEngine(["ab<end>"]), bytes_tokenizer)).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", None)
    assert answer["usage"]["completion_tokens"] == 3


def test_characters_are_never_split(bytes_tokenizer: Tokenizer) -> None:
    texts = [
        chunk["choices"][0]["text"] for chunk in stream_of(app_over(ScriptedEngine(["é🦩"]), bytes_tokenizer))
    ]
    assert texts == ["", "é", "", "", "", "🦩"]


class Client:
    """A client of the application at the ASGI level, which can leave at any moment."""

    def __init__(self, app: ASGIApp, *, max_unread: int = 0, **fields: Any) -> None:
        body = json.dumps({"model": "bytes", "prompt": "Hi", **fields}).encode()
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": body})
        self.sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue(max_unread)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        self.task = asyncio.create_task(app(scope, self._incoming.get, self.sent.put))  # type: ignore[arg-type]

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def body(self) -> bytes:
        """Wait for the end, and return what was sent of the body that was not taken yet."""
        await self.task
        return b"".join(self.sent.get_nowait().get("body", b"") for _ in range(self.sent.qsize()))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_what_has_not_ended(bytes_tokenizer: Tokenizer, stream: bool) -> None:
    async def run() -> None:
        engine = ScriptedEngine()
        client = Client(app_over(engine, bytes_tokenizer), n=3, stream=stream)
        await engine.submitted.wait()
        first, second, third = (request.request_id for request in engine.requests)
        engine.send(first, b"ab", finish_reason="length")
        engine.send(second, b"ab")
        if stream:
            while (await client.sent.get()).get("body", b"").count(b'"length"') == 0:
                pass
        client.leave()
        await client.task
        assert engine.cancelled == [second, third]
        assert len(engine.router) == 0

    asyncio.run(asyncio.wait_for(run(), timeout=60))


def test_a_client_that_leaves_while_a_chunk_cannot_be_sent(bytes_tokenizer: Tokenizer) -> None:
    """A client that reads nothing blocks the server in `send`."""

    async def run() -> None:
        engine = ScriptedEngine()
        client = Client(app_over(engine, bytes_tokenizer), max_unread=1, n=2, stream=True)
        await engine.submitted.wait()
        for request in engine.requests:
            engine.send(request.request_id, b"abc")
        client.leave()
        await client.task
        assert engine.cancelled == [request.request_id for request in engine.requests]

    asyncio.run(asyncio.wait_for(run(), timeout=60))


def test_an_error_of_one_choice_ends_a_plain_request(bytes_tokenizer: Tokenizer) -> None:
    async def run() -> None:
        engine = ScriptedEngine()
        client = Client(app_over(engine, bytes_tokenizer), n=2)
        await engine.submitted.wait()
        first, second = (request.request_id for request in engine.requests)
        engine.send(first, b"ab")
        engine.fail(second, "worker_failed", "out of memory")
        await client.task
        assert (await client.sent.get())["status"] == 500
        error = json.loads(await client.body())["error"]
        assert (error["message"], error["type"]) == ("Internal server error", "server_error")
        assert engine.cancelled == [first]

    asyncio.run(asyncio.wait_for(run(), timeout=60))


def test_an_error_in_a_stream_is_an_event_before_the_end(bytes_tokenizer: Tokenizer) -> None:
    async def run() -> None:
        engine = ScriptedEngine()
        client = Client(app_over(engine, bytes_tokenizer), n=2, **STREAM_USAGE)
        await engine.submitted.wait()
        first, second = (request.request_id for request in engine.requests)
        engine.send(first, b"ab")
        engine.fail(second, "unavailable", "the scheduler is not running")
        *_, last = events((await client.body()).decode())
        assert last == {
            "error": {
                "message": "the scheduler is not running",
                "type": "service_unavailable",
                "param": None,
                "code": None,
            }
        }
        assert engine.cancelled == [first]

    asyncio.run(asyncio.wait_for(run(), timeout=60))


def test_a_bug_in_a_stream_tells_nothing(
    bytes_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        engine = ScriptedEngine()
        client = Client(app_over(engine, bytes_tokenizer), stream=True)
        await engine.submitted.wait()
        engine.send(engine.requests[0].request_id, ["not a token"])  # type: ignore[list-item]
        (event,) = events((await client.body()).decode())
        assert event["error"]["message"] == "Internal server error"

    asyncio.run(asyncio.wait_for(run(), timeout=60))
    assert "a stream failed" in caplog.text


def test_a_running_request_is_deleted_by_its_id(bytes_tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine()
    app = app_over(engine, bytes_tokenizer)

    async def run() -> tuple[httpx.Response, httpx.Response, httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://purefill") as client:
            body = {"model": "bytes", "prompt": "Hi", "n": 2, "request_id": "mine"}
            completing = asyncio.create_task(client.post("/v1/completions", json=body))
            await engine.submitted.wait()
            deleted = await client.delete("/v1/requests/mine")
            unknown = await client.delete("/v1/requests/min")
            return deleted, unknown, await completing

    deleted, unknown, completion = asyncio.run(run())
    assert deleted.status_code == 200
    assert deleted.json()["deleted"] is True
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "request_not_found"
    assert completion.status_code == 499
    assert completion.json()["error"]["code"] == "request_cancelled"


def test_cached_tokens_count_once_for_each_prompt(bytes_tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(["a", "b"] * 2)
    engine.num_cached = (3, 5, 0, 5)
    fields = {"prompt": ["abcdef", "ghijkl"], "n": 2, "stream_options": {"include_usage": True}}
    body = complete(app_over(engine, bytes_tokenizer), stream=True, **fields).text
    assert events(body)[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    engine = ScriptedEngine(["a"])
    engine.num_cached = (2,)
    usage = complete(app_over(engine, bytes_tokenizer)).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


def test_what_may_be_shared_depends_on_model_and_salt(bytes_tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(["a"] * 5)
    app = app_over(engine, bytes_tokenizer)
    for fields in ({}, {"prompt": "other"}, {"cache_salt": "s"}, {"cache_salt": "t"}):
        assert complete(app, **fields).status_code == 200
    prefixes = [request.prefix for request in engine.requests]
    assert prefixes[0] == prefixes[1] != b"", "no block of these prompts is complete"
    assert len(set(prefixes)) == 3
    assert complete(app_over(engine, bytes_tokenizer, prefix_cache=False)).status_code == 200
    assert engine.requests[-1].prefix == b""
    for salt in ("", "x" * 257, 5):
        answer = complete(app, cache_salt=salt)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt")
