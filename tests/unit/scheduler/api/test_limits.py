"""What one ApiServer takes on at once, and how long it waits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import normalizers

from scheduler.api.server import make_room_for_files
from scheduler.api.tokenizer import Tokenizer
from scheduler.errors import ConfigError
from tests.unit.scheduler.api.scripted import (
    ScriptedEngine,
    app_over,
    byte_tokenizer,
    chat,
    complete,
    send,
)
from tests.unit.scheduler.api.test_completions import Client


def test_more_requests_at_once_than_may_be(bytes_tokenizer: Tokenizer) -> None:
    """The rest is refused at once, with a time to come back; a stream counts to its last byte."""

    async def run() -> None:
        engine = ScriptedEngine()
        app = app_over(engine, bytes_tokenizer, max_concurrent_requests=2)
        clients = []
        for stream in (True, False):
            engine.submitted.clear()
            clients.append(Client(app, stream=stream))
            await engine.submitted.wait()
        for stream in (True, False):
            refused = Client(app, stream=stream)
            start = await refused.sent.get()
            assert start["status"] == 429
            assert (b"retry-after", b"1") in start["headers"]
            assert b"must have at most 2 requests at once" in await refused.body()
        engine.send(engine.requests[0].request_id, b"a", finish_reason="length")
        await clients[0].task
        later = Client(app, stream=True)
        assert (await later.sent.get())["status"] == 200
        for client in (later, clients[1]):
            client.leave()
            await client.task
        assert len(engine.requests) == 3

    asyncio.run(asyncio.wait_for(run(), timeout=60))


def test_probes_and_scrapes_always_pass(bytes_tokenizer: Tokenizer) -> None:
    async def run() -> None:
        engine = ScriptedEngine()
        app = app_over(engine, bytes_tokenizer, max_concurrent_requests=1)
        client = Client(app)
        await engine.submitted.wait()
        for path in ("/health", "/ready", "/metrics", "/v1/models"):
            assert (await asyncio.to_thread(send, app, "GET", path)).status_code == 200
        client.leave()
        await client.task

    asyncio.run(asyncio.wait_for(run(), timeout=60))


def test_all_bodies_together_are_bounded(bytes_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.api.app._OPEN_BODY_BYTES", 300)

    async def run() -> None:
        engine = ScriptedEngine()
        app = app_over(engine, bytes_tokenizer, max_body_bytes=50)
        first = Client(app, x="y")
        await engine.submitted.wait()
        others = [Client(app) for _ in range(12)]
        statuses = [(await client.sent.get())["status"] for client in others[8:]]
        assert set(statuses) == {429}
        assert b"must have at most 300 bytes together" in await others[-1].body()
        for client in (first, *others):
            client.leave()
            await client.task
        engine.submitted.clear()
        again = Client(app)
        await engine.submitted.wait()
        again.leave()
        await again.task

    asyncio.run(asyncio.wait_for(run(), timeout=60))


def test_a_body_that_does_not_come_in_time(bytes_tokenizer: Tokenizer) -> None:
    async def parts() -> Any:
        yield b"{"
        await asyncio.Event().wait()

    app = app_over(ScriptedEngine(), bytes_tokenizer, client_timeout_s=0.01)
    headers = {"content-type": "application/json"}
    answer = send(app, "POST", "/v1/completions", content=parts(), headers=headers)
    assert answer.status_code == 408
    assert answer.json()["error"]["code"] == "body_timeout"


def test_long_texts_are_refused_before_they_are_tokenised_whatever_the_tokenizer_does_to_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    byte_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    normalising = HfTokenizer.from_file(str(path))
    normalising.normalizer = normalizers.NFC()
    normalising.save(str(path))
    tokenizer = Tokenizer(path)

    async def encode(*_: Any, **__: Any) -> Any:
        raise AssertionError("tokenised for nothing")

    monkeypatch.setattr(tokenizer, "encode", encode)
    answer = complete(app_over(ScriptedEngine(), tokenizer), prompt="x" * 2000)
    assert answer.status_code == 400
    assert "has 2000 characters, which is longer than the model's context length allows" in answer.text


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "a"}] * 2049}, "at most 2048 parts, got 2049"),
        (
            {
                "role": "assistant",
                "tool_calls": [{"id": "", "function": {"name": "", "arguments": ""}}] * 129,
            },
            "messages.0.tool_calls must hold at most 128 items",
        ),
    ],
)
def test_messages_of_too_many_parts(bytes_tokenizer: Tokenizer, message: dict[str, Any], said: str) -> None:
    answer = chat(app_over(ScriptedEngine(), bytes_tokenizer), messages=[message])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("messages.0")
    assert said in answer.json()["error"]["message"]


def test_more_connections_than_open_files_are_refused_at_start() -> None:
    with pytest.raises(
        ConfigError, match=r"max_connections must be <= \d+, as a process may have \d+ open files"
    ):
        make_room_for_files(2**40)


def test_a_refused_request_leaves_its_place(bytes_tokenizer: Tokenizer) -> None:
    app = app_over(ScriptedEngine(["a"]), bytes_tokenizer, max_concurrent_requests=1)
    for _ in range(3):
        assert complete(app, n=0).status_code == 400
        assert send(app, "POST", "/v1/nothing").status_code == 404
    assert complete(app).status_code == 200
