"""Processes that are the ranks of one group, for tests."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed

from worker.parallel import ops
from worker.parallel.group import ShardGroup

_TIMEOUT_S = 120
_context = multiprocessing.get_context("forkserver")
# Importing takes seconds, and each rank is then a copy of a process that has done it.
_context.set_forkserver_preload(["tests.support.ranks", "worker.model", "worker.prefill", "worker.decode"])


def run_ranks(function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
    """Call ``function(group, *arguments)`` in each of `size` processes that form a group; return what each returns."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, ends = [], []
    for rank in range(size):
        end, far_end = _context.Pipe(duplex=False)
        process = _context.Process(
            target=_run, args=(far_end, store.port, rank, size, function, arguments), daemon=True
        )
        process.start()
        far_end.close()
        processes.append(process)
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
