"""What every journal does. Each test runs against the one in memory, a Redis, and a cluster of Redis."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from scheduler.journal.base import Entry, Journal, JournalError, Orphan, Write
from scheduler.journal.memory import MemoryJournal, MemoryStore
from scheduler.journal.pipe import Pipe
from scheduler.journal.redis_journal import RedisJournal
from scheduler.journal.redis_url import connect
from scheduler.journal.resp import Command
from tests.support.redis_server import running_redis

Scenario = Callable[["Journals"], Awaitable[None]]
LONG_S = 3600.0

_numbers = itertools.count()


class Journals:
    """Makes the journals of one service. Owners live and entries are kept for an hour unless a test says else."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._store = MemoryStore(LONG_S)
        self._model = f"test-{next(_numbers)}"
        self._made: list[Journal] = []

    async def join(self, owner: str, *, lease_s: float = LONG_S, ttl_s: float = LONG_S) -> Journal:
        journal: Journal
        if self._url == "memory":
            self._store.ttl_s = ttl_s
            journal = MemoryJournal(self._store, owner, lease_s=lease_s)
        else:
            journal = RedisJournal(connect(self._url), owner, model=self._model, ttl_s=ttl_s, lease_s=lease_s)
        await journal.renew()
        self._made.append(journal)
        return journal

    async def close(self) -> None:
        for journal in self._made:
            await journal.close()


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture(scope="module")
def cluster_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster of one node that has all slots: it refuses commands with keys of two slots like any other."""
    with running_redis(tmp_path_factory.mktemp("cluster"), "--cluster-enabled", "yes") as server:
        give_all_slots(server.port)
        yield server.url.replace("redis", "redis+cluster", 1)


def give_all_slots(port: int) -> None:
    async def give() -> None:
        pipe = connect(f"redis://127.0.0.1:{port}")
        await pipe.calls([("CLUSTER", "ADDSLOTS", *range(16384))])

        async def is_whole() -> bool:
            return b"cluster_state:ok" in (await pipe.calls([("CLUSTER", "INFO")]))[0]

        await until(is_whole)
        await pipe.close()

    asyncio.run(asyncio.wait_for(give(), 60))


@pytest.fixture(params=["memory", "redis", "cluster"])
def check(request: pytest.FixtureRequest) -> Callable[[Scenario], None]:
    """Runs a scenario against one kind of journal."""
    url = "memory" if request.param == "memory" else request.getfixturevalue(f"{request.param}_url")

    def run(scenario: Scenario) -> None:
        async def in_time() -> None:
            journals = Journals(url)
            try:
                await asyncio.wait_for(scenario(journals), 60)
            finally:
                await journals.close()

        asyncio.run(in_time())

    return run


async def until(condition: Callable[[], Awaitable[object]]) -> None:
    """Ask again and again; the scenario's own time limit ends it."""
    for pause_s in itertools.repeat(0.01):
        if await condition():
            return
        await asyncio.sleep(pause_s)


def entry(**changes: object) -> Entry:
    fields: dict[str, object] = {"record": b"r", "fingerprint": "f", "state": "open", "owner": "a"}
    return Entry(**{**fields, **changes})  # type: ignore[arg-type]


def test_an_entry_is_made_once(check: Callable[[Scenario], None]) -> None:
    async def scenario(journals: Journals) -> None:
        a, b = await journals.join("a"), await journals.join("b")
        assert await a.read("1") is None
        assert await a.accept("1", b"r", "f") is None
        assert await b.accept("1", b"other", "g") == entry()
        assert await a.accept("1", b"other", "g") == entry()
        assert await b.read("1") == entry()
        # An owner that asks again, because it got no answer, is not told that somebody else was first.
        assert await a.accept("1", b"r", "f") is None

    check(scenario)


def test_of_many_at_once_one_makes_the_entry(check: Callable[[Scenario], None]) -> None:
    async def scenario(journals: Journals) -> None:
        made = [await journals.join(f"{i}") for i in range(4)]
        found = await asyncio.gather(*(j.accept("1", b"%d" % (i % 4), "f") for i, j in enumerate(made * 4)))
        assert len({was.record for was in found if was is not None}) == 1
        winner = next(was.record for was in found if was is not None)
        assert [i % 4 for i, was in enumerate(found) if was is None] == [int(winner)] * 4

    check(scenario)


def test_what_is_written_is_read_from_any_place_on(check: Callable[[Scenario], None]) -> None:
    async def scenario(journals: Journals) -> None:
        a, b = await journals.join("a"), await journals.join("b")
        await a.accept("1", b"r", "f")
        await a.accept("2", b"s", "f")
        groups = (b"\x00\xff", b"two", b"three")
        assert await a.write([Write(entry_id="1", group=groups[0]), Write(entry_id="2", group=b"x")]) == []
        await a.write([Write(entry_id="1", group=groups[1]), Write(entry_id="1", group=groups[2])])
        assert await b.read("1") == entry(groups=groups)
        assert await b.read("1", 2) == entry(groups=groups[2:])
        assert await b.read("1", 3) == await b.read("1", 9) == entry()
        assert await b.read("2") == entry(record=b"s", groups=(b"x",))
        assert await a.write([]) == []

    check(scenario)


@pytest.mark.parametrize("state", ["done", "failed"])
def test_an_end_comes_with_the_last_group(check: Callable[[Scenario], None], state: str) -> None:
    async def scenario(journals: Journals) -> None:
        a = await journals.join("a")
        await a.accept("1", b"r", "f")
        await a.write([Write(entry_id="1", group=b"last", state=state, error="why")])  # type: ignore[arg-type]
        assert await a.read("1") == entry(groups=(b"last",), state=state, error="why")
        await a.close()
        b = await journals.join("b")
        assert await b.orphans(9) == []

    check(scenario)


def test_a_failed_entry_is_replaced_and_a_finished_one_is_not(check: Callable[[Scenario], None]) -> None:
    async def scenario(journals: Journals) -> None:
        a, b = await journals.join("a"), await journals.join("b")
        for entry_id in "12":
            await a.accept(entry_id, b"r", "f")
        await a.write([Write(entry_id="1", group=b"x", state="failed", error="why")])
        await a.write([Write(entry_id="2", group=b"x", state="done")])
        assert await b.accept("1", b"again", "g") is None
        assert await b.read("1") == entry(record=b"again", fingerprint="g", owner="b")
        assert await b.accept("2", b"again", "g") == entry(state="done")

    check(scenario)


def test_a_removed_entry_is_gone(check: Callable[[Scenario], None]) -> None:
    async def scenario(journals: Journals) -> None:
        a = await journals.join("a")
        await a.accept("1", b"r", "f")
        await a.write([Write(entry_id="1", group=b"x")])
        assert await a.write([Write(entry_id="1", state="removed")]) == []
        assert await a.read("1") is None
        assert await a.write([Write(entry_id="1", group=b"late")]) == ["1"]
        assert await a.accept("1", b"new", "f") is None
        assert await a.read("1") == entry(record=b"new")

    check(scenario)


def test_who_lives_keeps_its_entries(check: Callable[[Scenario], None]) -> None:
    async def scenario(journals: Journals) -> None:
        a, b = await journals.join("a"), await journals.join("b")
        await a.accept("1", b"r", "f")
        await b.renew()
        assert await b.orphans(9) == []
        assert await a.orphans(9) == []
        assert await b.write([Write(entry_id="1", group=b"x", state="done")]) == ["1"]
        assert await b.read("1") == entry()

    check(scenario)


@pytest.mark.parametrize("end", ["close", "silence"])
def test_the_entries_of_the_dead_are_taken_over_once(check: Callable[[Scenario], None], end: str) -> None:
    async def scenario(journals: Journals) -> None:
        a = await journals.join("a", lease_s=0.05 if end == "silence" else LONG_S)
        for entry_id in ("1", "2", "3"):
            await a.accept(entry_id, b"r", "f")
        await a.write([Write(entry_id="1", group=b"x"), Write(entry_id="3", state="done")])
        if end == "close":
            await a.close()
        b, c = await journals.join("b"), await journals.join("c")

        async def both_found() -> bool:
            await b.renew()
            return len(await b.orphans(9)) == 2

        await until(both_found)
        assert len(await b.orphans(1)) == 1
        orphan = Orphan(entry_id="1", owner="a")
        assert orphan in await b.orphans(9)
        assert await b.take_over(orphan) == entry(owner="b", groups=(b"x",))
        assert await c.take_over(orphan) is None
        assert await b.orphans(9) == [Orphan(entry_id="2", owner="a")]
        # Should the owner live after all, what it writes is refused.
        if end == "silence":
            await a.renew()
            assert await a.write([Write(entry_id="1", group=b"stale")]) == ["1"]
            assert await a.write([Write(entry_id="2", group=b"fresh")]) == []
        assert await b.write([Write(entry_id="1", group=b"y")]) == []
        assert await c.read("1") == entry(owner="b", groups=(b"x", b"y"))

    check(scenario)


def test_a_released_entry_is_anybodys(check: Callable[[Scenario], None]) -> None:
    async def scenario(journals: Journals) -> None:
        a, b = await journals.join("a"), await journals.join("b")
        await a.accept("1", b"r", "f")
        await a.write([Write(entry_id="1", group=b"x", state="released")])
        assert await b.read("1") == entry(owner="", groups=(b"x",))
        assert await b.orphans(9) == [Orphan(entry_id="1", owner="")]
        assert await b.take_over(Orphan(entry_id="1", owner="")) == entry(owner="b", groups=(b"x",))
        assert await a.orphans(9) == await b.orphans(9) == []

    check(scenario)


def test_what_is_gone_or_finished_is_not_taken_over(check: Callable[[Scenario], None]) -> None:
    async def scenario(journals: Journals) -> None:
        a, b = await journals.join("a"), await journals.join("b")
        await a.accept("1", b"r", "f")
        await a.write([Write(entry_id="1", state="done")])
        for entry_id in "12":
            assert await b.take_over(Orphan(entry_id=entry_id, owner="a")) is None
        assert await b.read("1") == entry(state="done")

    check(scenario)


def test_entries_are_forgotten_in_time(check: Callable[[Scenario], None]) -> None:
    async def scenario(journals: Journals) -> None:
        a = await journals.join("a", ttl_s=0.05)
        await a.accept("1", b"r", "f")
        await a.write([Write(entry_id="1", group=b"x", state="done")])

        async def is_gone() -> bool:
            return await a.read("1") is None

        await until(is_gone)
        assert await a.accept("1", b"new", "f") is None
        found = await a.read("1")
        assert found is None or found.groups == ()

    check(scenario)


class SlowPipe:
    """Sends one command after the other, as many or those of a cluster travel; something happens after each."""

    def __init__(self, pipe: Pipe, after: Callable[[Command], Awaitable[None]]) -> None:
        self._pipe, self._after = pipe, after

    async def calls(self, commands: Sequence[Command]) -> list[Any]:
        answers = []
        for command in commands:
            answers += await self._pipe.calls([command])
            await self._after(command)
        return answers

    async def close(self) -> None:
        await self._pipe.close()


def test_who_looks_while_an_entry_is_released_does_not_lose_it(redis_url: str) -> None:
    async def scenario() -> None:
        model = f"test-{next(_numbers)}"
        b = RedisJournal(connect(redis_url), "b", model=model, ttl_s=LONG_S)
        await b.renew()

        async def look(command: Command) -> None:
            for orphan in await b.orphans(9):
                await b.take_over(orphan)

        a = RedisJournal(SlowPipe(connect(redis_url), look), "a", model=model, ttl_s=LONG_S)
        await a.renew()
        await a.accept("1", b"r", "f")
        await a.write([Write(entry_id="1", state="released")])
        await a.close()
        assert await b.read("1") == entry(owner="b")
        # And it is known to be b's, should that die.
        await b.close()
        c = RedisJournal(connect(redis_url), "c", model=model, ttl_s=LONG_S)
        await c.renew()
        assert await c.orphans(9) == [Orphan(entry_id="1", owner="b")]
        await c.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_who_took_an_entry_over_knows_it_whatever_comes_then(redis_url: str) -> None:
    async def scenario() -> None:
        model = f"test-{next(_numbers)}"
        a = RedisJournal(connect(redis_url), "a", model=model, ttl_s=LONG_S)
        await a.renew()
        await a.accept("1", b"r", "f")
        await a.close()

        async def break_off(command: Command) -> None:
            if command[0] == "SREM":
                raise JournalError("the connection broke")

        b = RedisJournal(SlowPipe(connect(redis_url), break_off), "b", model=model, ttl_s=LONG_S)
        await b.renew()
        assert await b.take_over(Orphan(entry_id="1", owner="a")) == entry(owner="b")
        await b.renew()
        await b.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_full_redis_has_room_again_once_entries_are_removed(tmp_path: Path) -> None:
    async def scenario() -> None:
        with running_redis(tmp_path) as server:
            a = RedisJournal(connect(server.url), "a", model="m", ttl_s=LONG_S)
            await a.renew()
            entry_ids = [f"{i}" for i in range(200)]
            for entry_id in entry_ids:
                await a.accept(entry_id, b"r" * 10_000, "f")
            admin = connect(server.url)
            ((_, used),) = [
                line.split(b":")
                for line in (await admin.calls([("INFO", "memory")]))[0].splitlines()
                if line.startswith(b"used_memory:")
            ]
            await admin.calls([("CONFIG", "SET", "maxmemory", int(used) - 1_000_000)])
            for call in (a.accept("new", b"r", "f"), a.renew(), a.write([Write(entry_id="1", group=b"x")])):
                with pytest.raises(JournalError):
                    await call
            assert await a.write([Write(entry_id=i, state="removed") for i in entry_ids]) == []
            await a.renew()
            assert await a.accept("new", b"r", "f") is None
            await a.close()
            await admin.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_memory_keeps_within_its_bytes() -> None:
    async def scenario() -> None:
        journal = MemoryJournal(MemoryStore(LONG_S, max_bytes=100), "a")
        await journal.renew()
        await journal.accept("open", b"r" * 40, "f")
        for i in range(9):
            await journal.accept(f"{i}", b"r" * 40, "f")
            await journal.write([Write(entry_id=f"{i}", state="done")])
        kept = [i for i in range(9) if await journal.read(f"{i}") is not None]
        assert kept == [8]
        assert await journal.read("open") is not None

    asyncio.run(scenario())


def test_a_redis_that_dies_is_noticed_and_found_again(tmp_path: Path) -> None:
    """No call hangs, none waits while it is known to be away, and what was written is there afterwards."""

    async def scenario() -> None:
        with running_redis(tmp_path, "--appendonly", "yes", "--appendfsync", "always") as server:
            journal = RedisJournal(connect(server.url), "a", model="m", ttl_s=LONG_S)
            await journal.renew()
            await journal.accept("1", b"r", "f")
            server.stop()
            with pytest.raises(JournalError, match="cannot be reached"):
                await journal.read("1")
            assert not journal.is_up
            with pytest.raises(JournalError, match="cannot be reached"):
                await journal.accept("2", b"r", "f")
            with pytest.raises(JournalError):
                await journal.renew()
            server.start()
            await journal.renew()
            assert journal.is_up
            assert await journal.read("1") == entry()
            # Whoever lived through it could not say so: nobody is taken for dead right after.
            assert await journal.orphans(9) == []
            await journal.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_redis_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        with running_redis(tmp_path) as server:
            journal = RedisJournal(connect(server.url), "a", model="m", ttl_s=LONG_S)
            await journal.renew()
            server.signal(signal.SIGSTOP)
            with pytest.raises(JournalError):
                await journal.accept("1", b"r", "f")
            assert not journal.is_up
            server.signal(signal.SIGCONT)

            async def is_back() -> bool:
                with suppress(JournalError):
                    await journal.renew()
                return journal.is_up

            await until(is_back)
            await journal.accept("1", b"r", "f")
            assert await journal.read("1") == entry()
            await journal.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_sentinels_say_where_redis_is(tmp_path: Path) -> None:
    async def scenario(url: str) -> None:
        journal = RedisJournal(connect(url), "a", model="m", ttl_s=LONG_S)
        await journal.renew()
        await journal.accept("1", b"r", "f")
        assert await journal.read("1") == entry()
        await journal.close()

    with running_redis(tmp_path) as server:
        config = tmp_path / "sentinel.conf"
        config.write_text(f"sentinel monitor primary 127.0.0.1 {server.port} 1\n")
        with running_redis(tmp_path, "--sentinel", command=str(config)) as sentinel:
            url = f"redis+sentinel://127.0.0.1:{sentinel.port}/primary"
            asyncio.run(asyncio.wait_for(scenario(url), 60))
