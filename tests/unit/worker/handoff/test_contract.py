"""What every transport must do, between two real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scheduler.errors import HandoffError, StaleLeaseError
from scheduler.messages import PoolHandle
from tests.support.handoff_peer import PAGE_SIZE, fill, lease, open_handoff, read_handle
from worker.handoff.base import Arrival, Handoff, Writing
from worker.handoff.channel import Channel, Manifest, join
from worker.handoff.sender import SendHandoff, Staging

PEER = Path(__file__).parents[3] / "support" / "handoff_peer.py"
TIMEOUT_S = 60


@dataclass
class Decode:
    """A decode worker's process."""

    process: subprocess.Popen[str]
    handle: PoolHandle

    def ask(self, what: str, *pages: int, epoch: int = 0, value: float = 0.0) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        command = {"what": what, "pages": pages, "epoch": epoch, "value": value}
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def holds(self, value: float, *pages: int) -> bool:
        """Whether all of these pages are full of a value."""
        return bool(self.ask("read", *pages) == [value, value])


@contextmanager
def decode_worker(
    transport: str, num_pages: int = 32, host: str = "127.0.0.1", prefix: tuple[str, ...] = ()
) -> Iterator[Decode]:
    command = [*prefix, sys.executable, str(PEER), "decode", transport, str(num_pages), host]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Decode(process, read_handle(process.stdout.readline()))
        finally:
            process.kill()


@pytest.fixture(params=["shm", "shm_ranks", "gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def transport(request: pytest.FixtureRequest) -> str:
    if request.param == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs two GPUs")
    return str(request.param)


@pytest.fixture
def start(transport: str) -> Iterator[Callable[..., tuple[Decode, Handoff]]]:
    with ExitStack() as stack:

        def start(num_pages: int = 32) -> tuple[Decode, Handoff]:
            decode = stack.enter_context(decode_worker(transport, num_pages))
            handoff = open_handoff(decode.handle, num_staging_pages=num_pages)
            stack.callback(handoff.close)
            assert handoff.transport == transport.removesuffix("_ranks")
            return decode, handoff

        yield start


Start = Callable[..., tuple[Decode, Handoff]]


def write(handoff: Handoff, writing: Writing, *values: float) -> None:
    for value, page_ids in zip(values, writing.page_ids, strict=True):
        fill(handoff.pool, page_ids, value)


def arrive(handoff: Handoff, writing: Writing) -> Arrival:
    return handoff.finish(writing).result(TIMEOUT_S)


def test_writings_arrive_where_the_leases_say(start: Start) -> None:
    decode, handoff = start()
    for round_ in range(3):  # over one connection
        epoch = 10 * round_ + 1
        writing = handoff.begin([lease(epoch, 3, 1), lease(epoch + 1, 2)], [2 * PAGE_SIZE, 1])
        assert not writing.refused
        write(handoff, writing, epoch, 0.5 + epoch)
        arrival = arrive(handoff, writing)
        assert arrival.errors == {}
        assert arrival.num_bytes == 3 * handoff.pool.page_bytes
        assert decode.holds(epoch, 1, 3)
        assert decode.holds(0.5 + epoch, 2)
        assert decode.holds(0, 4, 5)
        assert decode.ask("check", 3, 1, epoch=epoch)
        assert decode.ask("check", 2, epoch=epoch + 1)


def test_pages_for_later_belong_to_the_lease_too(start: Start) -> None:
    decode, handoff = start()
    writing = handoff.begin([lease(5, 3, 1, 7)], [PAGE_SIZE])
    write(handoff, writing, 2)
    assert arrive(handoff, writing).errors == {}
    assert decode.holds(2, 3)
    assert decode.ask("check", 3, 1, 7, epoch=5)


def test_cached_pages_stay_as_they_are_and_only_the_others_travel(start: Start) -> None:
    decode, handoff = start()
    first = handoff.begin([lease(5, 3, 1)], [2 * PAGE_SIZE])
    write(handoff, first, 2)
    assert arrive(handoff, first).errors == {}
    sharing = replace(lease(6, 3, 1, 2), shared_epochs=(5, 5))
    writing = handoff.begin([sharing], [3 * PAGE_SIZE])
    assert not writing.refused
    # Who does not see the pages computes their content too.
    (num_cached,) = writing.num_cached or (0,)
    assert num_cached in (0, 2 * PAGE_SIZE)
    fill(handoff.pool, writing.page_ids[0][num_cached // PAGE_SIZE :], 9)
    arrival = arrive(handoff, writing)
    assert (arrival.errors, arrival.num_bytes) == ({}, handoff.pool.page_bytes)
    assert decode.holds(2, 3, 1)
    assert decode.holds(9, 2)
    assert decode.ask("check", 3, 1, epoch=5)
    assert decode.ask("check", 2, epoch=6)


def test_nothing_at_all(start: Start) -> None:
    decode, handoff = start()
    for leases in ([], [lease(5)]):
        arrival = arrive(handoff, handoff.begin(leases, [0] * len(leases)))
        assert (arrival.errors, arrival.num_bytes) == ({}, 0)
    assert decode.ask("check", 1, epoch=0)


def test_ten_thousand_pages(start: Start) -> None:
    decode, handoff = start(num_pages=10_000)
    pages = tuple(reversed(range(1, 10_001)))
    writing = handoff.begin([lease(5, *pages[:4]), lease(6, *pages[4:])], [4 * PAGE_SIZE, 9_996 * PAGE_SIZE])
    write(handoff, writing, 3, 4)
    # Content tells the pages apart.
    own = writing.page_ids[1]
    fill(handoff.pool, own[:1], 5)
    fill(handoff.pool, own[-1:], 6)
    arrival = arrive(handoff, writing)
    assert arrival.errors == {}
    assert arrival.num_bytes == 10_000 * handoff.pool.page_bytes
    assert decode.holds(3, *pages[:4])
    assert decode.holds(5, pages[4])
    assert decode.holds(4, *pages[5:-1])
    assert decode.holds(6, pages[-1])


def test_a_newer_lease_keeps_its_pages(start: Start) -> None:
    """The late one is refused, and the other leases of the writing do not notice."""
    decode, handoff = start()
    writing = handoff.begin([lease(5, 3, 1), lease(6, 2)], [2 * PAGE_SIZE, PAGE_SIZE])
    write(handoff, writing, 7, 8)
    assert decode.ask("own", 1, epoch=9, value=1)
    arrival = arrive(handoff, writing)
    assert [type(error) for error in arrival.errors.values()] == [StaleLeaseError]
    assert list(arrival.errors) == [0]
    assert arrival.num_bytes == handoff.pool.page_bytes
    assert decode.holds(1, 1)
    assert decode.ask("check", 1, epoch=9)
    assert not decode.ask("check", 3, 1, epoch=5)
    assert decode.holds(8, 2)


def test_an_old_epoch_is_refused_from_the_start(start: Start) -> None:
    decode, handoff = start()
    assert decode.ask("own", 1, epoch=9, value=1)
    writing = handoff.begin([lease(5, 1)], [PAGE_SIZE])
    write(handoff, writing, 7)
    arrival = arrive(handoff, writing)
    assert {**writing.refused, **arrival.errors}.keys() == {0}
    assert decode.holds(1, 1)


def test_a_decode_worker_dies_in_the_middle(start: Start) -> None:
    """The prefill worker goes on, with all its pages."""
    decode, handoff = start(num_pages=1000)
    pages = tuple(range(1, 1001))
    for _ in range(2):
        writing = handoff.begin([lease(5, *pages)], [1000 * PAGE_SIZE])
        write(handoff, writing, 7)
        if decode.process.returncode is None:
            decode.process.send_signal(signal.SIGSTOP)  # so it cannot have answered when it dies
        sending = handoff.finish(writing)
        decode.process.kill()
        decode.process.wait()
        errors = sending.result(TIMEOUT_S).errors
        if handoff.transport != "shm":  # memory outlives its owner, for as long as it is mapped
            assert isinstance(errors[0], HandoffError)


# What only transports have that send messages.


@pytest.fixture
def receiving() -> Iterator[Decode]:
    with decode_worker("gloo") as decode:
        yield decode


def open_channel(decode: Decode) -> tuple[Channel, Staging]:
    handoff = open_handoff(decode.handle)
    assert isinstance(handoff, SendHandoff)
    handoff.close()
    staging = Staging(handoff.pool)
    return join(decode.handle.endpoint, handoff.pool.device), staging


def send_manifest(channel: Channel, manifest: Manifest) -> None:
    numbers = manifest.encode()
    channel.send(len(manifest.leases), len(numbers))
    channel.send_numbers(numbers)


def test_a_page_that_gets_a_newer_owner_between_messages_is_passed_over(receiving: Decode) -> None:
    channel, staging = open_channel(receiving)
    fill(staging.pool, [1, 2], 7)
    send_manifest(channel, Manifest(leases=[lease(5, 3, 4)], num_written=[2]))
    while not receiving.ask("check", 3, 4, epoch=5):
        pass  # not claimed yet
    assert receiving.ask("own", 4, epoch=9, value=1)
    channel.send_content(staging.pool.read_pages([1, 2]))
    assert channel.receive(1) == [0]
    assert receiving.holds(7, 3)
    assert receiving.holds(1, 4)


def test_a_prefill_worker_dies_in_the_middle(receiving: Decode) -> None:
    """The decode worker takes what others send."""
    channel, _ = open_channel(receiving)
    send_manifest(channel, Manifest(leases=[lease(5, 3, 4)], num_written=[2]))
    del channel
    handoff = open_handoff(receiving.handle)
    writing = handoff.begin([lease(6, 3, 4)], [2 * PAGE_SIZE])
    write(handoff, writing, 2)
    assert arrive(handoff, writing).errors == {}
    handoff.close()
    assert receiving.holds(2, 3, 4)


def test_prefill_waits_for_pages_of_its_own(receiving: Decode) -> None:
    handoff = open_handoff(receiving.handle, num_staging_pages=3)
    assert handoff.max_pages == 3
    for epoch in range(1, 20):
        writing = handoff.begin([lease(epoch, epoch, epoch + 1)], [2 * PAGE_SIZE])
        write(handoff, writing, epoch)
        last = handoff.finish(writing)
    assert last.result(TIMEOUT_S).errors == {}
    handoff.close()
    assert receiving.holds(19, 19, 20)


def test_what_waits_behind_another_writing_fails_when_its_connection_is_closed(receiving: Decode) -> None:
    """Whoever waits for it is told, and its pages come back: they serve other decode workers too."""
    handoff = open_handoff(receiving.handle, num_staging_pages=4)
    receiving.process.send_signal(
        signal.SIGSTOP
    )  # so that the first one is under way for as long as it lives
    arriving = [handoff.finish(handoff.begin([lease(epoch, epoch)], [PAGE_SIZE])) for epoch in (1, 2, 3)]
    handoff.close()
    receiving.process.kill()
    receiving.process.wait()
    assert all(isinstance(sent.result(TIMEOUT_S).errors[0], HandoffError) for sent in arriving)
    assert len(handoff.begin([lease(4, 1, 2, 3, 4)], [4 * PAGE_SIZE]).page_ids[0]) == 4


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them; 10.77.0.1 and 10.77.0.2."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip")
    names = (f"pf{os.getpid()}a", f"pf{os.getpid()}b")
    with ExitStack() as stack:
        for name in names:
            try:
                run("ip", "netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"this kernel gives no network namespaces: {error.stderr!r}")
            stack.callback(run, "ip", "netns", "del", name)
        run(
            "ip",
            "link",
            "add",
            names[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            names[1],
            "netns",
            names[1],
        )
        for number, name in enumerate(names, 1):
            run("ip", "-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", name)
            run("ip", "-n", name, "link", "set", name, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield names


def test_from_one_network_namespace_to_another(namespaces: tuple[str, str]) -> None:
    here, there = (("ip", "netns", "exec", name) for name in namespaces)
    with decode_worker("gloo", host="10.77.0.1", prefix=here) as decode:
        handle = json.dumps({name: getattr(decode.handle, name) for name in PoolHandle.__slots__})
        ended = subprocess.run(
            [*there, sys.executable, str(PEER), "prefill"],
            input=handle + "\n",
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        assert json.loads(ended.stdout)["errors"] == {}
        assert decode.holds(7, 1, 3)
        assert decode.holds(8, 2)
