"""The ranks of a tensor-parallel worker, and what they compute together."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
import torch.distributed.distributed_c10d

from worker.parallel import ops
from worker.parallel.link import Leader, Meeting, connect

if TYPE_CHECKING:
    from worker.model_runner import ModelRunner

_HOST = "127.0.0.1"
distributed: Any = torch.distributed  # of what is used here, torch's types know hardly anything
_c10d: Any = torch.distributed.distributed_c10d
_TIMEOUT = timedelta(minutes=30)
"""The longest that one rank loads while another waits for it. That a rank died is noticed elsewhere (`link`)."""


class ShardGroup:
    """Owns the connections of one rank to the others, by NCCL on GPUs and gloo on CPUs.

    All ranks must call its methods in the same order. On a GPU they are enqueued on the current stream, and may be
    captured.
    """

    def __init__(
        self, store: Any, *, rank: int, size: int, device: torch.device, leader: Leader | None = None
    ) -> None:
        """Meet the other ranks at a store of torch.distributed. Rank 0 has a `leader`, which tells them what to do."""
        self.rank = rank
        self.size = size
        self.leader = leader
        self._store = store
        self.started: Sequence[object] = ()
        """What was started for the other ranks, which may end when nobody has it any more."""
        self.runners: WeakValueDictionary[int, ModelRunner] = WeakValueDictionary()
        """By number. The ranks make the same runners in the same order."""
        self._num_runners = 0
        if device.type == "cuda":
            # The ranks are processes of one host, so nothing need listen elsewhere.
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
            nccl = distributed.ProcessGroupNCCL.Options()
            nccl._timeout = _TIMEOUT
            self._process_group = distributed.ProcessGroupNCCL(store, rank, size, nccl)
        else:
            options = distributed.ProcessGroupGloo._Options()
            options._devices = [distributed.ProcessGroupGloo.create_device(hostname=_HOST)]
            options._timeout = _TIMEOUT
            self._process_group = distributed.ProcessGroupGloo(store, rank, size, options)

    def close(self) -> None:
        """On rank 0, let the other ranks end."""
        if self.leader is not None:
            self.leader.close()

    def enrol(self, runner: ModelRunner) -> int:
        """Return the number of a new runner."""
        number = self._num_runners
        self._num_runners += 1
        self.runners[number] = runner
        return number

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a dense tensor by the sum of those of all ranks."""
        options = _c10d.AllreduceOptions()
        options.asyncOp = False
        self._finish(self._process_group.allreduce([tensor], options))

    def gather(self, gathered: torch.Tensor, tensor: torch.Tensor) -> None:
        """Fill `gathered`, ``[size, ...]``, with the dense tensors ``[...]`` of all ranks."""
        options = _c10d.AllgatherOptions()
        options.asyncOp = False
        self._finish(self._process_group._allgather_base(gathered.view(-1), tensor.view(-1), options))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replace a dense tensor by that of rank 0."""
        options = _c10d.BroadcastOptions()
        options.rootRank = 0
        options.asyncOp = False
        self._finish(self._process_group.broadcast([tensor], options))

    @staticmethod
    def _finish(work: Any) -> None:
        if work is not None:
            work.wait()


def lead_group(
    size: int,
    device: torch.device,
    start: Callable[[int, Meeting], object],
    on_loss: Callable[[Exception], object],
) -> ShardGroup:
    """Make a group with this process as rank 0; ``start(rank, meeting)`` starts the process of each other rank.

    `on_loss` is called by a thread when one of them is gone later. Raises `ConfigError` if they do not come.
    """
    listener = socket.create_server((_HOST, 0))
    port = listener.getsockname()[1]
    # Given a socket of ours, torch listens on that address only.
    store = distributed.TCPStore(
        _HOST,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        timeout=_TIMEOUT,
    )
    leader = Leader(port)
    started = [start(rank, leader.meeting) for rank in range(1, size)]
    leader.accept(size - 1, on_loss)
    group = ShardGroup(store, rank=0, size=size, device=device, leader=leader)
    group.started = started
    ops.enter(group)
    return group


def join_group(
    meeting: Meeting, *, rank: int, size: int, device: torch.device
) -> tuple[ShardGroup, Connection]:
    """Become another rank of a group; return it and the connection over which its leader says what to do."""
    connection = connect(meeting)
    store = distributed.TCPStore(_HOST, meeting.store_port, is_master=False, timeout=_TIMEOUT)
    group = ShardGroup(store, rank=rank, size=size, device=device)
    ops.enter(group)
    return group, connection
