"""Processes of the benchmark of tensor parallelism: one for each rank, which sees one GPU only, as in the service."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scheduler.messages import WorkerConfig
from worker.kv_pool import KVSpec
from worker.parallel.group import ShardGroup
from worker.parallel.link import Meeting

SCRIPT = Path(__file__).with_name("tensor_parallel.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a process of its own does."""

    task: str
    config: WorkerConfig
    prefill_sizes: Sequence[str]
    decode_sizes: Sequence[str]
    steps: int
    repeats: int
    time_limit_s: float
    is_silent: bool = False
    """Ranks say nothing to each other, and compute something else than the model."""
    rank: int = 0
    meeting: Meeting | None = None
    pool: tuple[KVSpec, int, int] | None = None
    """Of the pages to own: their shape, how many they are, tokens of each."""


def run(job: Job) -> Any:
    """Return what a task gives, in a process of its own that leads the others. Raises `RuntimeError` if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result"
        process = start(job, str(out))
        what = f"{job.task} with {job.config.tensor_parallel_size} ranks"
        try:
            code = process.wait(job.time_limit_s)
        except subprocess.TimeoutExpired:
            process.kill()  # The other ranks end with it.
            process.wait()
            raise RuntimeError(f"{what} took more than {job.time_limit_s:g} s") from None
        if code != 0:
            raise RuntimeError(f"{what} ended with {code}")
        return pickle.loads(out.read_bytes())


def start(job: Job, out: str = "", *, pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start a process for a rank's part of a job, which sees the rank's GPU only; it inherits these descriptors."""
    known = os.environ.get("PUREFILL_BENCH_GPUS") or os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = known.split(",") if known else [str(i) for i in range(16)]
    env = {**os.environ, "PUREFILL_BENCH_GPUS": ",".join(gpus), "CUDA_VISIBLE_DEVICES": gpus[job.rank]}
    # Of no use to so few GPUs, and not everywhere to be had.
    env.setdefault("NCCL_NVLS_ENABLE", "0")
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "--job", out],
        stdin=subprocess.PIPE,
        stdout=sys.stderr,
        env=env,
        pass_fds=pass_fds,
    )
    assert process.stdin is not None
    pickle.dump(job, process.stdin)
    process.stdin.flush()
    return process


def silence() -> None:
    """Leave out what ranks say to each other in a pass."""

    def gather(_: ShardGroup, gathered: torch.Tensor, tensor: torch.Tensor) -> None:
        gathered.copy_(tensor.expand_as(gathered))

    ShardGroup.all_reduce = lambda *_: None  # type: ignore[method-assign]
    ShardGroup.broadcast = lambda *_: None  # type: ignore[method-assign]
    ShardGroup.gather = gather  # type: ignore[method-assign]
