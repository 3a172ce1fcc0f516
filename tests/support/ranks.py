"""Processes that are the ranks of one group, for tests."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed

from scheduler.messages import WorkerConfig
from worker.parallel import ops
from worker.parallel.follower import follow
from worker.parallel.group import ShardGroup, lead_group

_TIMEOUT_S = 120
_context = multiprocessing.get_context("forkserver")
# Importing takes seconds, and each rank is then a copy of a process that has done it.
_context.set_forkserver_preload(["tests.support.ranks", "worker.decode"])


def run_leader(function: Callable[..., Any], config: WorkerConfig, *arguments: Any) -> Any:
    """Return ``function(group, config, *arguments)`` of a process that is rank 0; the other ranks follow it."""
    processes, end = _start_all(function, config, arguments)
    try:
        return _receive(end)
    finally:
        for process in processes:
            process.kill()
            process.join()


def exits_of_followers(function: Callable[..., Any], config: WorkerConfig) -> list[int | None]:
    """Let ``function(group, config)`` end the process of rank 0; return how the others end, None for one that stays."""
    (leader, *followers), _ = _start_all(function, config, ())
    leader.join()
    codes = []
    for follower in followers:
        follower.join(_TIMEOUT_S)
        codes.append(follower.exitcode)
        follower.kill()
    return codes


def _start_all(
    function: Callable[..., Any], config: WorkerConfig, arguments: tuple[Any, ...]
) -> tuple[list[Any], Connection]:
    """Start all ranks, rank 0 first; return them and where rank 0 says what the function returned."""
    followers, meetings = [], []
    for rank in range(1, config.tensor_parallel_size):
        far_end, end = _context.Pipe(duplex=False)
        followers.append(_start(_follow, config, far_end, rank))
        meetings.append(end)
    end, far_end = _context.Pipe(duplex=False)
    leader = _start(_lead, far_end, config, meetings, function, arguments)
    far_end.close()
    return [leader, *followers], end


def _start(target: Callable[..., None], *arguments: Any) -> Any:
    process = _context.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def _lead(
    end: Connection,
    config: WorkerConfig,
    meetings: list[Connection],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    group = lead_group(
        config.tensor_parallel_size,
        torch.device("cpu"),
        lambda rank, meeting: meetings[rank - 1].send(meeting),
        lambda error: os._exit(1),
    )
    end.send_bytes(pickle.dumps(function(group, config, *arguments)))


def _follow(config: WorkerConfig, meeting: Connection, rank: int) -> None:
    follow(config, meeting.recv(), rank)


def run_ranks(function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
    """Call ``function(group, *arguments)`` in each of `size` processes that form a group; return what each returns."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, ends = [], []
    for rank in range(size):
        end, far_end = _context.Pipe(duplex=False)
        processes.append(_start(_run, far_end, store.port, rank, size, function, arguments))
        far_end.close()
        ends.append(end)
    try:
        return [_receive(end) for end in ends]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _run(
    end: Connection, port: int, rank: int, size: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=_TIMEOUT_S))
    group = ShardGroup(store, rank=rank, size=size, device=torch.device("cpu"))
    ops.enter(group)
    # Not `send`, which would leave tensors in this process for the other to fetch.
    end.send_bytes(pickle.dumps(function(group, *arguments)))


def _receive(end: Connection) -> Any:
    assert end.poll(_TIMEOUT_S), "a rank does not answer"
    return pickle.loads(end.recv_bytes())
