"""Idempotency-Key and what survives whom: ApiServers over one journal, with engines whose tokens the test decides."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from scheduler.api.idempotency import KEY_HEADER, REPLAYED_HEADER
from scheduler.api.journaling import Journaling
from scheduler.api.tokenizer import Tokenizer
from scheduler.errors import OverloadedError, UnavailableError
from scheduler.journal.base import Entry, JournalError, Orphan, Write
from scheduler.journal.memory import MemoryJournal, MemoryStore
from tests.unit.scheduler.api.scripted import END, MODEL, ScriptedEngine, app_over, events


class SharedJournal(MemoryJournal):
    """Of one ApiServer among several: memory that counts as durable, can be away, and may lose its answers."""

    is_durable = True

    def __init__(self, store: MemoryStore, owner: str) -> None:
        super().__init__(store, owner, lease_s=3600)
        self.is_away = False
        self.is_full = False
        self.loses_answers = False
        self.num_reads = 0

    @property
    def is_up(self) -> bool:
        return not self.is_away and not self.is_full

    @property
    def renew_every_s(self) -> float:
        return 0.01

    def check(self) -> None:
        if self.is_away or self.is_full:
            raise JournalError("the journal cannot be reached")

    async def renew(self) -> None:
        self.check()
        await super().renew()

    async def accept(self, entry_id: str, record: bytes, fingerprint: str) -> Entry | None:
        self.check()
        entry = await super().accept(entry_id, record, fingerprint)
        self.lose_answer()
        return entry

    def lose_answer(self) -> None:
        if self.loses_answers:
            self.loses_answers = False
            raise JournalError("no answer")

    async def write(self, writes: Sequence[Write]) -> list[str]:
        self.is_full = self.is_full and not all(write.state == "removed" for write in writes)
        self.check()
        refused = await super().write(writes)
        self.lose_answer()
        return refused

    async def read(self, entry_id: str, first_group: int = 0) -> Entry | None:
        self.check()
        self.num_reads += 1
        entry = await super().read(entry_id, first_group)
        await asyncio.sleep(0)  # Others have their turn before an answer is there.
        return entry

    async def orphans(self, limit: int) -> list[Orphan]:
        self.check()
        return await super().orphans(limit)


class Server:
    """An ApiServer without its socket."""

    def __init__(self, store: MemoryStore, name: str, tokenizer: Tokenizer, **settings: Any) -> None:
        self.engine = ScriptedEngine()
        self.journal = SharedJournal(store, name)
        on_failure = settings.pop("on_failure", "refuse")
        self.journaling = Journaling(self.journal, on_failure=on_failure, group_s=0.01)
        self.sent: list[Any] = []
        """What the clients of `begin` were sent."""
        self._store, self._name = store, name
        self._app = app_over(self.engine, tokenizer, journaling=self.journaling, **settings)
        transport = httpx.ASGITransport(self._app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://purefill", timeout=None)

    async def post(self, key: str | None = None, *, api_key: str = "", **fields: Any) -> httpx.Response:
        headers = {KEY_HEADER: key} if key is not None else {}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        return await self.client.post(
            fields.pop("path", "/v1/completions"), json=body_of(fields), headers=headers
        )

    async def begin(self, key: str | None = None, **fields: Any) -> Callable[[], Awaitable[None]]:
        """Send a request; return what lets its client go away, once the engine has it."""
        gone = asyncio.Event()
        content = json.dumps(body_of(fields)).encode()
        sent = iter([{"type": "http.request", "body": content, "more_body": False}])

        async def receive() -> Any:
            for message in sent:
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            self.sent.append(message)

        headers = [(b"content-type", b"application/json")]
        headers += [] if key is None else [(KEY_HEADER.lower().encode(), key.encode())]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": headers,
            "query_string": b"",
            "http_version": "1.1",
            "scheme": "http",
            "server": ("purefill", 80),
        }
        num_before = len(self.engine.requests)
        serving = asyncio.ensure_future(self._app(scope, receive, send))
        await until(lambda: len(self.engine.requests) > num_before)

        async def leave() -> None:
            gone.set()
            await serving

        return leave

    def die(self) -> None:
        """Write nothing more, and live no more: the process is gone."""
        self.journal.is_away = True
        self._store.alive_until_s.pop(self._name, None)


def body_of(fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": MODEL.name, "prompt": "Hi", "max_tokens": 8, **fields}


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition; the scenario's own time limit ends it."""
    for pause_s in itertools.repeat(0.005):
        if condition():
            return
        await asyncio.sleep(pause_s)


class World:
    """The ApiServers of one service."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.store = MemoryStore(3600)
        self._tokenizer = tokenizer
        self._servers: list[Server] = []

    async def server(self, **settings: Any) -> Server:
        server = Server(self.store, f"api-{len(self._servers)}", self._tokenizer, **settings)
        self._servers.append(server)
        await server.journaling.start()
        return server

    async def written(self, num_tokens: int) -> None:
        """Wait until so many tokens are in the journal."""

        def count() -> int:
            runs = [
                run
                for s in self.store.slots.values()
                for group in s.groups
                for run in json.loads(group)["runs"]
            ]
            return sum(len(run.get("t", ())) for run in runs)

        await until(lambda: count() >= num_tokens)

    async def close(self) -> None:
        for server in self._servers:
            await server.journaling.stop()
            await server.client.aclose()


Scenario = Callable[[World], Coroutine[Any, Any, None]]


@pytest.fixture
def play(bytes_tokenizer: Tokenizer) -> Callable[[Scenario], None]:
    def run(scenario: Scenario) -> None:
        async def in_time() -> None:
            async with asyncio.timeout(60), closing(World(bytes_tokenizer)) as world:
                await scenario(world)

        asyncio.run(in_time())

    return run


@asynccontextmanager
async def closing(world: World) -> AsyncIterator[World]:
    try:
        yield world
    finally:
        await world.close()


def texts(answer: httpx.Response) -> str:
    return "".join(event["choices"][0]["text"] for event in events(answer.text))


Play = Callable[[Scenario], None]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_repeated_request_gets_the_same_answer_and_is_computed_once(play: Play, elsewhere: bool) -> None:
    async def scenario(world: World) -> None:
        first = await world.server()
        second = await world.server() if elsewhere else first
        first.engine.restart(["Hello<end>"])
        one = await first.post("k", n=1, logprobs=2)
        two = await second.post("k", n=1, logprobs=2)
        assert (one.status_code, one.json()["choices"][0]["text"]) == (200, "Hello")
        assert two.text == one.text
        assert (one.headers[KEY_HEADER], two.headers[KEY_HEADER]) == ("k", "k")
        assert REPLAYED_HEADER not in one.headers
        assert two.headers[REPLAYED_HEADER] == "true"
        assert len({r.request_id for s in (first, second) for r in s.engine.requests}) == 1

    play(scenario)


def test_a_repeated_stream_starts_with_the_first_token(play: Play) -> None:
    async def scenario(world: World) -> None:
        server = await world.server()
        server.engine.restart(["Hello, you<end>"])
        one = await server.post("k", stream=True, max_tokens=32)
        two = await server.post("k", stream=True, max_tokens=32)
        assert texts(one) == texts(two) == "Hello, you"
        assert events(one.text) == events(two.text)
        assert len(server.engine.requests) == 1

    play(scenario)


def test_chats_and_several_choices_are_repeated_too(play: Play) -> None:
    async def scenario(world: World) -> None:
        server = await world.server()
        server.engine.restart(["Yes<end>", "No<end>"])
        chat = {"path": "/v1/chat/completions", "messages": [{"role": "user", "content": "Hi"}], "n": 2}
        one = await server.post("k", logprobs=True, top_logprobs=1, prompt=None, **chat)
        two = await server.post("k", logprobs=True, top_logprobs=1, prompt=None, **chat)
        assert [choice["message"]["content"] for choice in one.json()["choices"]] == ["Yes", "No"]
        assert two.text == one.text

    play(scenario)


def test_many_at_once_with_one_key_are_computed_once(play: Play) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.server(), await world.server()
        for server in (a, b):
            server.engine.restart(["Hello<end>"])
        answers = await asyncio.gather(*(server.post("k") for server in (a, b) for _ in range(4)))
        assert len({answer.text for answer in answers}) == 1
        assert answers[0].status_code == 200
        assert len(a.engine.requests) + len(b.engine.requests) == 1

    play(scenario)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": "Ho"},
        {"stream": True},
        {"path": "/v1/chat/completions", "prompt": None, "messages": [{"role": "user", "content": "Hi"}]},
    ],
)
def test_a_key_with_another_request_is_refused(play: Play, changes: dict[str, Any]) -> None:
    async def scenario(world: World) -> None:
        server = await world.server()
        server.engine.restart(["Hello<end>"])
        assert (await server.post("k")).status_code == 200
        other = await server.post("k", **changes)
        error = other.json()["error"]
        assert (other.status_code, error["code"], error["param"]) == (
            422,
            "idempotency_key_reused",
            KEY_HEADER,
        )
        assert KEY_HEADER in error["message"]
        assert len(server.engine.requests) == 1

    play(scenario)


def test_fields_may_come_in_another_order(play: Play) -> None:
    async def scenario(world: World) -> None:
        server = await world.server()
        server.engine.restart(["Hello<end>"])
        one = await server.post("k", seed=1, temperature=0.5)
        assert (await server.post("k", temperature=0.5, seed=1)).text == one.text

    play(scenario)


def test_a_key_belongs_to_its_api_key(play: Play) -> None:
    async def scenario(world: World) -> None:
        server = await world.server(api_keys=("first", "second"))
        server.engine.restart(["Mine<end>", "Yours<end>"])
        one = await server.post("k", api_key="first")
        two = await server.post("k", api_key="second")
        assert [answer.json()["choices"][0]["text"] for answer in (one, two)] == ["Mine", "Yours"]

    play(scenario)


@pytest.mark.parametrize("key", ["", "k" * 256, "with space"])
def test_a_key_that_is_none_is_refused(play: Play, key: str) -> None:
    async def scenario(world: World) -> None:
        server = await world.server()
        answer = await server.post(key)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, KEY_HEADER)
        assert "1 to 255 visible ASCII characters" in answer.json()["error"]["message"]

    play(scenario)


def test_a_key_is_made_for_who_has_none(play: Play) -> None:
    """A durable journal gives the client of a stream what it takes to ask again, should everything die."""

    async def scenario(world: World) -> None:
        server = await world.server()
        server.engine.restart(["Hello<end>", "Again<end>"])
        answer = await server.post()
        assert len(answer.headers[KEY_HEADER]) == 32
        # It got its answer; nothing is kept for it.
        await until(lambda: not world.store.slots)

    play(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_finds_its_result_when_it_comes_back(play: Play, stream: bool) -> None:
    async def scenario(world: World) -> None:
        server = await world.server()
        server.engine.restart([])
        server.engine.texts = None
        leave = await server.begin("k", stream=stream)
        request_id = server.engine.requests[0].request_id
        server.engine.send(request_id, list(b"Hel"))
        await leave()
        assert server.engine.cancelled == []
        again = asyncio.ensure_future(server.post("k", stream=stream))
        server.engine.send(request_id, [*b"lo", END], start=3, finish_reason="stop")
        answer = await again
        text = texts(answer) if stream else answer.json()["choices"][0]["text"]
        assert text == "Hello"
        assert len(server.engine.requests) == 1

    play(scenario)


def test_a_client_without_a_key_that_goes_ends_its_request(play: Play) -> None:
    async def scenario(world: World) -> None:
        server = await world.server()
        server.engine.texts = None
        leave = await server.begin(stream=True)
        await leave()
        assert server.engine.cancelled == [server.engine.requests[0].request_id]
        await until(lambda: not world.store.slots)

    play(scenario)


def test_a_stop_string_ends_a_request_whose_client_is_gone(play: Play) -> None:
    async def scenario(world: World) -> None:
        server = await world.server()
        server.engine.texts = None
        leave = await server.begin("k", stop=["lo"])
        await leave()
        request_id = server.engine.requests[0].request_id
        server.engine.send(request_id, list(b"Hello, "))
        await until(lambda: server.engine.cancelled == [request_id])
        answer = await server.post("k", stop=["lo"])
        assert answer.json()["choices"][0]["text"] == "Hel"
        assert answer.json()["choices"][0]["stop_reason"] == "lo"

    play(scenario)


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1.0}, {"n": 2, "logprobs": 1}])
def test_what_a_dead_server_began_goes_on_elsewhere(play: Play, fields: dict[str, Any]) -> None:
    async def scenario(world: World) -> None:
        first = await world.server()
        first.engine.texts = None
        lost = asyncio.ensure_future(first.post("k", max_tokens=6, **fields))
        await until(lambda: len(first.engine.requests) == fields.get("n", 1))
        begun = first.engine.requests[:]
        first.engine.send(begun[0].request_id, list(b"abc"))
        await world.written(3)
        first.die()
        second = await world.server()
        second.engine.texts = None
        await until(lambda: len(second.engine.requests) == len(begun))
        resumed = second.engine.requests
        assert resumed[0].output_token_ids == tuple(b"abc")
        assert [r.sampling for r in resumed] == [r.sampling for r in begun]
        assert [r.prompt_token_ids for r in resumed] == [r.prompt_token_ids for r in begun]
        assert not {r.request_id for r in resumed} & {r.request_id for r in begun}
        # Its client may come back before, or after, the rest is there.
        early = asyncio.ensure_future(second.post("k", max_tokens=6, **fields))
        second.engine.send(resumed[0].request_id, list(b"def"), start=3, finish_reason="length")
        for request in resumed[1:]:
            second.engine.send(request.request_id, list(b"uvwxyz"), finish_reason="length")
        late = await second.post("k", max_tokens=6, **fields)
        expected = ["abcdef", "uvwxyz"][: len(begun)]
        assert [choice["text"] for choice in late.json()["choices"]] == expected
        assert (await early).text == late.text
        first.engine.send(begun[0].request_id, list(b"def"), start=3, finish_reason="length")
        for request in begun[1:]:
            first.engine.send(request.request_id, list(b"uvwxyz"), finish_reason="length")
        assert (await lost).text == late.text

    play(scenario)


def test_only_what_is_missing_is_computed(play: Play) -> None:
    """One choice was complete, and the write of its tokens was repeated as nobody confirmed it."""

    async def scenario(world: World) -> None:
        first = await world.server()
        first.engine.texts = None
        lost = asyncio.ensure_future(first.post("k", n=2, max_tokens=3))
        await until(lambda: len(first.engine.requests) == 2)
        done, begun = (request.request_id for request in first.engine.requests)
        first.journal.loses_answers = True
        first.engine.send(done, list(b"abc"), finish_reason="length")
        first.engine.send(begun, list(b"uv"))
        await world.written(2 * 5)
        first.die()
        second = await world.server()
        second.engine.texts = None
        await until(lambda: second.engine.requests)
        (resumed,) = second.engine.requests
        assert resumed.output_token_ids == tuple(b"uv")
        second.engine.send(resumed.request_id, list(b"w"), start=2, finish_reason="length")
        answer = await second.post("k", n=2, max_tokens=3)
        assert [choice["text"] for choice in answer.json()["choices"]] == ["abc", "uvw"]
        first.engine.send(begun, list(b"w"), start=2, finish_reason="length")
        assert (await lost).text == answer.text

    play(scenario)


def test_what_was_complete_but_not_closed_is_only_closed(play: Play) -> None:
    """The dead server had all tokens, up to a stop string that is in none of them."""

    async def scenario(world: World) -> None:
        first = await world.server()
        first.engine.texts = None
        lost = asyncio.ensure_future(first.post("k", stop=["c"], n=1))
        await until(lambda: len(first.engine.requests) == 1)
        first.engine.send(first.engine.requests[0].request_id, list(b"ab"))
        await world.written(2)
        first.die()
        world.store.add(
            next(iter(world.store.slots)),
            b'{"version":1,"runs":[{"c":0,"i":2,"t":[99,100]}]}',
            time.monotonic(),
        )
        second = await world.server()
        second.engine.texts = None
        answer = await second.post("k", stop=["c"], n=1)
        assert answer.json()["choices"][0]["text"] == "ab"
        assert second.engine.requests == []
        first.engine.send(first.engine.requests[0].request_id, list(b"cd"), start=2)
        assert (await lost).text == answer.text

    play(scenario)


def test_a_stream_from_another_server_goes_on_from_where_the_journal_is(play: Play) -> None:
    async def scenario(world: World) -> None:
        first, second = await world.server(), await world.server()
        first.engine.texts = None
        original = asyncio.ensure_future(first.post("k", stream=True))
        await until(lambda: len(first.engine.requests) == 1)
        request_id = first.engine.requests[0].request_id
        first.engine.send(request_id, list(b"abc"))
        again = asyncio.ensure_future(second.post("k", stream=True))
        await world.written(3)
        for i, token_id in enumerate(b"defg"):
            first.engine.send(request_id, [token_id], start=3 + i)
            await world.written(4 + i)
        first.engine.send(request_id, list(b"h"), start=7, finish_reason="length")
        assert texts(await again) == texts(await original) == "abcdefgh"
        assert second.engine.requests == []

    play(scenario)


def test_a_write_without_an_answer_doubles_no_token(play: Play) -> None:
    async def scenario(world: World) -> None:
        first, second = await world.server(), await world.server()
        first.engine.texts = None
        original = asyncio.ensure_future(first.post("k", max_tokens=5))
        await until(lambda: len(first.engine.requests) == 1)
        request_id = first.engine.requests[0].request_id
        first.journal.loses_answers = True
        first.engine.send(request_id, list(b"abc"))
        await world.written(6)
        first.engine.send(request_id, list(b"de"), start=3, finish_reason="length")
        assert (await second.post("k", max_tokens=5)).text == (await original).text

    play(scenario)


@pytest.mark.parametrize("key", [None, "k"])
def test_what_may_have_been_written_down_is_not_waited_for(play: Play, key: str | None) -> None:
    async def scenario(world: World) -> None:
        server = await world.server()
        server.engine.restart(["Hello<end>", "Hello<end>"])
        server.journal.loses_answers = True
        assert (await server.post(key)).status_code == 503
        await until(lambda: not world.store.slots)
        assert (await server.post(key)).json()["choices"][0]["text"] == "Hello"

    play(scenario)


def test_what_waits_for_an_entry_spares_the_one_that_takes_its_place(play: Play) -> None:
    async def scenario(world: World) -> None:
        server = await world.server()
        server.engine.restart(["Hello<end>"])
        server.journal.loses_answers = True
        assert (await server.post("k")).status_code == 503
        # At once, while the entry that may be there is still to be removed.
        answer = await server.post("k")
        assert (answer.status_code, len(server.engine.requests)) == (200, 1)
        await server.journaling.stop()
        await server.journaling.start()
        assert (await server.post("k")).text == answer.text
        assert len(server.engine.requests) == 1

    play(scenario)


def test_what_the_engine_refuses_is_forgotten(play: Play) -> None:
    async def scenario(world: World) -> None:
        server = await world.server()
        server.engine.refusal = OverloadedError("the queue is full")
        assert (await server.post("k")).status_code == 429
        assert not world.store.slots
        server.engine.refusal = None
        server.engine.restart(["Hello<end>"])
        assert (await server.post("k")).json()["choices"][0]["text"] == "Hello"

    play(scenario)


def test_a_failed_request_is_computed_again_for_who_asks_again(play: Play) -> None:
    async def scenario(world: World) -> None:
        server = await world.server()
        server.engine.texts = None
        first = asyncio.ensure_future(server.post("k"))
        await until(lambda: len(server.engine.requests) == 1)
        follower = asyncio.ensure_future(server.post("k"))
        # Each asks what is there; then one follows the other.
        await until(lambda: server.journal.num_reads > 2)
        server.engine.fail(server.engine.requests[0].request_id, "worker_failed", "broken")
        assert [(await answer).status_code for answer in (first, follower)] == [500, 500]
        server.engine.restart(["Hello<end>"])
        assert (await server.post("k")).json()["choices"][0]["text"] == "Hello"

    play(scenario)


def test_a_part_that_is_down_only_delays_what_was_accepted(play: Play) -> None:
    """Its client is told; meanwhile the request waits in the journal until the engine takes it again."""

    async def scenario(world: World) -> None:
        server = await world.server()
        server.engine.texts = None
        first = asyncio.ensure_future(server.post("k"))
        await until(lambda: len(server.engine.requests) == 1)
        server.engine.send(server.engine.requests[0].request_id, list(b"ab"))
        server.engine.refusal = UnavailableError("the scheduler is not running")
        server.engine.router.fail_all(server.engine.refusal)
        assert (await first).status_code == 503
        again = asyncio.ensure_future(server.post("k"))
        await until(lambda: [slot.owner for slot in world.store.slots.values()] == [""])
        server.engine.refusal = None
        await until(lambda: len(server.engine.requests) == 2)
        resumed = server.engine.requests[1]
        assert resumed.output_token_ids == tuple(b"ab")
        server.engine.send(resumed.request_id, list(b"cd"), start=2, finish_reason="length")
        assert (await again).json()["choices"][0]["text"] == "abcd"

    play(scenario)


def test_without_its_journal_a_server_refuses_and_is_not_ready(play: Play) -> None:
    async def scenario(world: World) -> None:
        server = await world.server()
        server.engine.restart(["Hello<end>", "Hello<end>"])
        ready = await server.client.get("/ready")
        assert (ready.status_code, ready.json()) == (200, {"journal": "up"})
        server.journal.is_away = True
        for key in (None, "k"):
            answer = await server.post(key)
            assert (answer.status_code, "journal" in answer.json()["error"]["message"]) == (503, True)
        assert (await server.client.get("/ready")).status_code == 503
        assert server.engine.requests == []
        assert not server.journaling.status().is_up
        server.journal.is_away = False
        assert (await server.post("k")).status_code == 200
        assert (await server.client.get("/ready")).status_code == 200

    play(scenario)


def test_a_server_may_go_on_without_its_journal(play: Play) -> None:
    async def scenario(world: World) -> None:
        server = await world.server(on_failure="continue")
        server.engine.restart(["Hello<end>", "Hello<end>", "Hello<end>"])
        server.journal.is_away = True
        for key in (None, "k"):
            answer = await server.post(key)
            assert answer.json()["choices"][0]["text"] == "Hello"
            assert KEY_HEADER not in answer.headers  # No promise is made.
        ready = await server.client.get("/ready")
        assert (ready.status_code, ready.json()) == (200, {"journal": "down"})
        assert server.journaling.status().num_unjournaled == 2

    play(scenario)


def test_tokens_wait_for_a_journal_that_is_away(play: Play) -> None:
    async def scenario(world: World) -> None:
        server = await world.server()
        server.engine.texts = None
        first = asyncio.ensure_future(server.post("k", max_tokens=4))
        await until(lambda: len(server.engine.requests) == 1)
        server.journal.is_away = True
        request_id = server.engine.requests[0].request_id
        server.engine.send(request_id, list(b"abcd"), finish_reason="length")
        answer = await first  # Its client gets it all the same.
        await until(lambda: server.journaling.status().lag_s > 0)
        server.journal.is_away = False
        assert (await server.post("k", max_tokens=4)).text == answer.text
        await until(lambda: server.journaling.status().lag_s == 0)

    play(scenario)


def test_an_entry_of_another_version_is_named_and_left_alone(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(world: World) -> None:
        server = await world.server()
        server.engine.restart(["Hello<end>"])
        await server.post("k")
        (slot,) = world.store.slots.values()
        await until(lambda: slot.state == "done")
        slot.record = slot.record.replace(b'"version":1', b'"version":2')
        answer = await server.post("k")
        assert answer.status_code == 503
        assert "version 2, this purefill reads version 1" in answer.json()["error"]["message"]
        # Neither does anybody take it over.
        slot.owner, slot.state = "", "open"
        world.store.open_ids[next(iter(world.store.slots))] = None
        other = await world.server()
        await until(lambda: "is left alone" in caplog.text)
        assert (slot.owner, other.engine.requests) == ("", [])

    play(scenario)


def test_a_service_that_stops_leaves_what_runs_to_the_next(play: Play) -> None:
    async def scenario(world: World) -> None:
        first = await world.server()
        first.engine.texts = None
        lost = asyncio.ensure_future(first.post("k", max_tokens=4))
        await until(lambda: len(first.engine.requests) == 1)
        first.engine.send(first.engine.requests[0].request_id, list(b"ab"))
        first.engine.router.fail_all(UnavailableError("the service is stopping"))
        await first.journaling.stop()  # Writes what no timer has written yet.
        assert (await lost).status_code == 503
        second = await world.server()
        second.engine.texts = None
        await until(lambda: second.engine.requests)
        (resumed,) = second.engine.requests
        assert resumed.output_token_ids == tuple(b"ab")
        second.engine.send(resumed.request_id, list(b"cd"), start=2, finish_reason="length")
        assert (await second.post("k", max_tokens=4)).json()["choices"][0]["text"] == "abcd"

    play(scenario)


@pytest.mark.parametrize("on_failure", ["refuse", "continue"])
def test_a_start_without_the_journal(play: Play, on_failure: str) -> None:
    async def scenario(world: World) -> None:
        journal = SharedJournal(world.store, "late")
        journal.is_away = True
        journaling = Journaling(journal, on_failure=on_failure)  # type: ignore[arg-type]
        if on_failure == "refuse":
            with pytest.raises(JournalError, match="cannot be reached"):
                await journaling.start()
        else:
            await journaling.start()
            journal.is_away = False
            await until(lambda: "late" in world.store.alive_until_s)
            await journaling.stop()

    play(scenario)


def test_a_journal_that_comes_up_late_is_waited_for(play: Play) -> None:
    async def scenario(world: World) -> None:
        journal = SharedJournal(world.store, "late")
        journal.is_away = True
        journaling = Journaling(journal)
        starting = asyncio.ensure_future(journaling.start(patience_s=60))
        await asyncio.sleep(0)
        journal.is_away = False
        await starting
        assert "late" in world.store.alive_until_s
        await journaling.stop()

    play(scenario)


@pytest.mark.parametrize("early", [False, True])
def test_the_key_that_the_answer_named_leads_to_the_result(play: Play, early: bool) -> None:
    """The client of a stream that broke, as everything died, comes back with the key that the head named."""

    async def scenario(world: World) -> None:
        first = await world.server()
        first.engine.texts = None
        leave = await first.begin(stream=True, max_tokens=4)
        await until(lambda: first.sent)
        key = dict(first.sent[0]["headers"])[KEY_HEADER.lower().encode()].decode()
        first.die()
        second = await world.server()
        second.engine.texts = None
        await until(lambda: second.engine.requests)
        again = asyncio.ensure_future(second.post(key, stream=True, max_tokens=4))
        if early:
            await until(lambda: second.journal.num_reads > 2)
        second.engine.send(second.engine.requests[0].request_id, list(b"abcd"), finish_reason="length")
        answer = await again
        assert (texts(answer), answer.headers[REPLAYED_HEADER]) == ("abcd", "true")
        assert texts(await second.post(key, stream=True, max_tokens=4)) == "abcd"
        assert len(second.engine.requests) == 1
        await leave()

    play(scenario)


@pytest.mark.parametrize(
    "record",
    [
        b"[" * 100_000,
        b'{"version":1}',
        None,
    ],
)
def test_an_entry_that_nobody_can_go_on_with_holds_up_no_other(play: Play, record: bytes | None) -> None:
    async def scenario(world: World) -> None:
        first = await world.server()
        first.engine.texts = None
        lost = [asyncio.ensure_future(first.post(key, max_tokens=2)) for key in ("bad", "good")]
        await until(lambda: len(first.engine.requests) == 2)
        bad = next(iter(world.store.slots.values()))
        if record is not None:
            bad.record = record
        else:
            bad.record = bad.record.replace(b"/v1/completions", b"/v9/completions")
        first.die()
        second = await world.server()
        second.engine.restart(["ok", "ok"])
        assert (await second.post("good", max_tokens=2)).json()["choices"][0]["text"] == "ok"
        if record is None:
            await until(lambda: bad.state == "failed")
        # What failed is forgotten; what cannot be read may be another version's.
        assert (await second.post("bad", max_tokens=2)).status_code == (200 if record is None else 503)
        first.engine.router.fail_all(UnavailableError("over"))
        await asyncio.gather(*lost)

    play(scenario)


@pytest.mark.parametrize("end", [{"group": b'{"version":1,"runs":[{"c":7,"i":0,"t":[1]}]}'}, {"error": ""}])
def test_who_follows_what_cannot_be_read_is_told(play: Play, end: dict[str, Any]) -> None:
    async def scenario(world: World) -> None:
        first, second = await world.server(), await world.server()
        first.engine.texts = None
        original = asyncio.ensure_future(first.post("k", max_tokens=2))
        await until(lambda: len(first.engine.requests) == 1)
        follower = asyncio.ensure_future(second.post("k", max_tokens=2))
        await until(lambda: second.journal.num_reads > 2)
        (entry_id,) = world.store.slots
        if "group" in end:
            world.store.add(entry_id, end["group"], time.monotonic())
        else:
            world.store.finish(entry_id, "failed", end["error"])
        assert (await follower).status_code == 503
        first.engine.router.fail_all(UnavailableError("over"))
        await original

    play(scenario)


def test_who_was_second_and_got_no_answer_leaves_the_first_alone(play: Play) -> None:
    """Both asked what is known by their key before either was written down."""

    async def scenario(world: World) -> None:
        server = await world.server()
        server.engine.texts = None
        server.engine.on_submit = lambda: setattr(server.journal, "loses_answers", True)
        both = [asyncio.ensure_future(server.post("k", max_tokens=4)) for _ in range(2)]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        await until(lambda: server.journaling.status().lag_s == 0)
        (request,) = server.engine.requests
        server.engine.send(request.request_id, list(b"abcd"), finish_reason="length")
        answers = await asyncio.gather(*both)
        assert sorted(answer.status_code for answer in answers) == [200, 503]
        await until(lambda: server.journaling.status().lag_s == 0)
        server.engine.restart(["other"])
        again = await server.post("k", max_tokens=4)
        assert again.json()["choices"][0]["text"] == "abcd"

    play(scenario)


def test_a_full_journal_is_relieved_of_what_nobody_wants(play: Play) -> None:
    """It refuses everything but removals, and so counts as away."""

    async def scenario(world: World) -> None:
        server = await world.server()
        server.engine.texts = None
        leave = await server.begin()
        await until(lambda: world.store.slots)
        server.journal.is_full = True
        await leave()
        await until(lambda: not world.store.slots)
        server.engine.restart(["Hello<end>"])
        assert (await server.post()).status_code == 200

    play(scenario)
