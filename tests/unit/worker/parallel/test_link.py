"""How ranks learn what to do, and of each other's end."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

import pytest

from scheduler.errors import ConfigError
from worker.parallel.link import ClosePool, Leader, Reply, connect, together

COMMAND = ClosePool(decode_worker="decode-0")
STRANGER = """
import os, socket, sys
os.setuid(65534)  # not earlier: that user may not be allowed to run this Python
connection = socket.socket(socket.AF_UNIX)
connection.settimeout(20)
connection.connect(chr(0) + sys.argv[1])
print("connected", flush=True)
print(connection.recv(1))
"""


class Linked:
    """A leader with two followers."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.leader = Leader(store_port=1)
        self.losses: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        coming: list[Future[Connection]] = [threads.submit(connect, self.leader.meeting) for _ in range(2)]
        self.leader.accept(2, self.losses.put)
        self.followers = [future.result() for future in coming]


@pytest.fixture
def linked() -> Iterator[Linked]:
    with ThreadPoolExecutor() as threads:
        linked = Linked(threads)
        yield linked
        linked.leader.close()


def test_followers_are_told_in_order_and_reply(linked: Linked) -> None:
    other = replace(COMMAND, decode_worker="decode-1")
    with together(linked.leader, COMMAND) as replies:
        linked.leader.tell(other)
        for number, follower in enumerate(linked.followers):
            assert [follower.recv(), follower.recv()] == [COMMAND, other]
            follower.send(Reply(value=number))
    assert sorted(replies) == [0, 1]


def test_what_one_follower_cannot_do_is_an_error(linked: Linked) -> None:
    for follower, error in zip(linked.followers, (None, "there is no memory"), strict=True):
        follower.send(Reply(error=error))
    with pytest.raises(ConfigError, match="there is no memory"), together(linked.leader, COMMAND):
        pass


def test_the_end_of_a_follower_is_noticed_while_nothing_is_said(linked: Linked) -> None:
    linked.followers[1].close()
    assert "a rank of the group is gone" in str(linked.losses.get(timeout=60))


def test_a_leader_that_ends_on_purpose_ends_its_followers_and_mourns_nobody(linked: Linked) -> None:
    linked.leader.close()
    for follower in linked.followers:
        with pytest.raises(EOFError):
            follower.recv()
    for thread in threading.enumerate():
        if thread.name == "follower":
            thread.join(60)
    assert linked.losses.empty()


def test_nobody_without_the_key_is_let_in() -> None:
    leader = Leader(store_port=1)
    stranger = replace(leader.meeting, key=b"guessed")
    with ThreadPoolExecutor() as threads:
        accepting = threads.submit(leader.accept, 1, lambda _: None)
        with pytest.raises(AuthenticationError):
            connect(stranger)
        follower = connect(leader.meeting)
        accepting.result()
        leader.tell(COMMAND)
        assert follower.recv() == COMMAND
    leader.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can have a child with another user")
def test_another_user_who_says_nothing_holds_nobody_up() -> None:
    leader = Leader(store_port=1)
    name = leader.meeting.address[1:]
    with (
        subprocess.Popen([sys.executable, "-c", STRANGER, name], stdout=subprocess.PIPE, text=True) as child,
        ThreadPoolExecutor() as threads,
    ):
        assert child.stdout is not None
        assert child.stdout.readline() == "connected\n"
        accepting = threads.submit(leader.accept, 1, lambda _: None)
        assert child.stdout.readline() == "b''\n"
        follower = connect(leader.meeting)
        accepting.result()
        follower.close()
    leader.close()


def test_together_without_a_leader_is_just_the_block() -> None:
    with together(None, COMMAND) as replies:
        pass
    assert replies == []
