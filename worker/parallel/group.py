"""The ranks of a tensor-parallel worker, and what they compute together."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.distributed_c10d

if TYPE_CHECKING:
    from worker.parallel.link import Leader

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
        self._next_runner = 0
        if device.type == "cuda":
            nccl = distributed.ProcessGroupNCCL.Options()
            nccl._timeout = _TIMEOUT
            self._process_group = distributed.ProcessGroupNCCL(store, rank, size, nccl)
        else:
            options = distributed.ProcessGroupGloo._Options()
            options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = _TIMEOUT
            self._process_group = distributed.ProcessGroupGloo(store, rank, size, options)

    def new_runner_id(self) -> int:
        """Return a number for a runner. The ranks make the same runners in the same order."""
        self._next_runner += 1
        return self._next_runner - 1

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
