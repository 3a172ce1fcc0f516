"""A model over several GPUs next to one GPU: right, how much faster, and what the ranks' sums take of the time.

    python benchmarks/tensor_parallel.py --models qwen3-8b --out tensor.json
    python benchmarks/tensor_parallel.py --models qwen3-32b --layers 16 --tasks measure
    python benchmarks/tensor_parallel.py --device cpu --models qwen3-tiny --prefill-sizes 4x16 --decode-sizes 4x32

Weights are random. The tasks are, in this order:

check     four layers in float32: logits and greedy tokens of two ranks, and of prefill and decode with different
          numbers of ranks, are those of one process
measure   prefill batches and decode steps of one process, of the ranks, and of ranks that leave out what they have to
          say to each other, whose results are wrong: the difference is the share of their sums
logits    in the model's own type: how far two ranks' logits are from one process's
handoff   prefill on one GPU into pages of its own, into those of another GPU's process by CUDA IPC, and by NCCL

Each rank is a process that sees one GPU only, as in the service. A time is a median: of a batch from token ids to
first tokens, of a step from one step's tokens to the next's. Each task begins in new processes; a model is compiled
for each number of ranks, a minute or two if the code is not in the cache. The last things printed are the tables.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from decode_step import num_pages
from rank_tasks import DECODE, Row, check, hand_off, logprobs, measure, own_pool, reference
from ranks import Job, run, silence, start
from shapes import NAMES, write_shape
from transformers import AutoConfig

from scheduler.messages import WorkerConfig
from worker import startup
from worker.parallel.follower import follow
from worker.parallel.group import ShardGroup, lead_group

TASKS = ("check", "measure", "logits", "handoff")
CHECK_LAYERS = 4


def work(job: Job, out: str) -> Any:
    """Do a process's part of a job; return what a leader gives."""
    if job.is_silent:
        silence()
    if job.task == "pool":
        return own_pool(job, out)
    if job.meeting is not None:
        follow(job.config, job.meeting, job.rank)
    size, group = job.config.tensor_parallel_size, None
    if size > 1:
        group = lead_group(
            size,
            torch.device(job.config.device),
            lambda rank, meeting: start(replace(job, rank=rank, meeting=meeting)),
            lambda _: os._exit(1),
        )
    tasks: dict[str, Callable[[Job, ShardGroup | None], Any]] = {
        "check": check,
        "logprobs": logprobs,
        "reference": reference,
        "measure": measure,
        "handoff": hand_off,
    }
    return tasks[job.task](job, group)


def check_tokens(folder: Path, job: Job, ranks: int, failures: list[str]) -> None:
    """Compare greedy tokens of groups with those of one process."""
    config = replace(
        job.config,
        model_folder=str(folder),
        dtype="float32",
        kv_memory_bytes=1 << 30,
        capture_tokens=(128,),
        max_num_seqs=4,
    )
    job = replace(job, task="check")
    (expected,) = run(replace(job, config=config)).values()
    made = run(replace(job, config=replace(config, tensor_parallel_size=ranks)))
    for name, tokens in made.items():
        print(f"  {name}: {'the same tokens' if tokens == expected else 'OTHER TOKENS'} in float32")
        if tokens != expected:
            failures.append(f"{name}: other tokens than one process")


def compare_logprobs(job: Job, ranks: int, failures: list[str]) -> None:
    """Print how far logprobs of one process and of ranks are from float32."""
    own: list[torch.Tensor] = run(replace(job, task="reference"))
    errors = {}
    for size in (1, ranks):
        config = replace(job.config, capture_tokens=(128,), max_num_seqs=8, tensor_parallel_size=size)
        found = run(replace(job, task="logprobs", config=config))
        differences = [
            logprob - own[prompt][place, token].item()
            for prompt, place, top in found
            for token, logprob in top
        ]
        errors[size] = statistics.fmean(d * d for d in differences) ** 0.5
        print(
            f"  ranks: {size}; logprobs of the 20 likeliest differ from float32 by {errors[size]:.2e} (RMS)"
        )
    if not errors[ranks] <= max(1.5 * errors[1], 1e-4):
        failures.append(
            f"logprobs of the ranks err by {errors[ranks]:.2e}, of one process by {errors[1]:.2e}"
        )


def measure_ranks(name: str, job: Job, ranks: int, rows: list[Row]) -> None:
    """Time one process, ranks, and ranks that say nothing to each other; append what each took to `rows`."""
    for size, is_silent in ((1, False), (ranks, False), (ranks, True)):
        config = replace(job.config, tensor_parallel_size=size)
        found = run(replace(job, task="measure", config=config, is_silent=is_silent))
        rows += [{"model": name, **row} for row in found]
    print_measured(rows)


def print_measured(rows: Sequence[Row]) -> None:
    """Print times by number of ranks, the speed-up, and the share of what ranks say to each other."""
    one = {row["size"]: row for row in rows if row["ranks"] == 1}
    silent = {row["size"]: row for row in rows if row["silent"]}
    print(f"\n{'size':>16}{'ranks':>6}{'one ms':>9}{'ranks ms':>10}{'speed-up':>10}{'sums':>7}")
    for row in rows:
        if row["ranks"] == 1 or row["silent"] or "ms" not in row or row["size"] not in one:
            continue
        ms, alone = row["ms"], one[row["size"]]["ms"]
        share = f"{1 - silent[row['size']]['ms'] / ms:7.0%}" if row["size"] in silent else f"{'-':>7}"
        print(f"{row['size']:>16}{row['ranks']:>6}{alone:9.2f}{ms:10.2f}{alone / ms:10.2f}{share}")


def print_handoffs(rows: Sequence[Row]) -> None:
    """Print what it takes to have the pages elsewhere."""
    print(
        f"\n{'transport':>10}{'prompts':>9}{'ms':>9}{'MiB':>9}{'extra ms':>10}{'of own':>8}{'GB/s':>8}{'differ':>9}"
    )
    for row in rows:
        print(
            f"{row['transport']:>10}{row['size']:>9}{row['ms']:9.2f}{row['mib']:9.1f}{row['extra_ms']:10.2f}"
            f"{row['share']:8.1%}{row['gb_per_s']:8.1f}{row['difference']:9.1e}"
        )


def make_config(name: str, folder: Path, args: argparse.Namespace) -> WorkerConfig:
    """Return the settings of both kinds of worker."""
    sizes = [tuple(map(int, size.split("x"))) for size in args.prefill_sizes]
    most_seqs = max(int(size.split("x")[0]) for size in args.decode_sizes)
    text = AutoConfig.from_pretrained(folder)
    itemsize = 4 if args.dtype == "float32" or args.device == "cpu" else 2
    token_bytes = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * itemsize
    page_size = startup.CUDA_PAGE_SIZE if args.device == "cuda" else startup.CPU_PAGE_SIZE
    pages = max(num_pages(size, args.steps, page_size) for size in args.decode_sizes)
    pages = max(pages, 1 + max(count * (2 - (-length // page_size)) for count, length in sizes), 256)
    pages += args.ranks  # What a rank loses by rounding.
    return WorkerConfig(
        name=DECODE,
        model_name=name,
        model_folder=str(folder),
        dtype=args.dtype,
        device=args.device,
        load_format="dummy",
        max_model_len=args.max_model_len,
        max_num_seqs=most_seqs,
        kv_memory_bytes=pages * (8 + page_size * token_bytes),
        capture_tokens=tuple(sorted({count * length for count, length in sizes})),
        max_capture_tokens=None,
        capture_slots=(8,),
        use_graphs=True,
        compile_cache_folder=args.compile_cache,
        num_threads=os.cpu_count() or 1,
    )


def bench_model(name: str, work_folder: Path, args: argparse.Namespace, failures: list[str]) -> list[Row]:
    """Do the tasks with one model, each whatever became of the others."""
    rows: list[Row] = []
    shape = write_shape(name, work_folder / "whole", num_layers=args.layers)
    job = Job(
        task="",
        config=make_config(name, shape, args),
        prefill_sizes=args.prefill_sizes,
        decode_sizes=args.decode_sizes,
        steps=args.steps,
        repeats=args.repeats,
        time_limit_s=args.time_limit_s,
    )
    for task in args.tasks:
        try:
            if task == "check":
                few = write_shape(name, work_folder / "few", num_layers=CHECK_LAYERS)
                check_tokens(few, job, args.ranks, failures)
            elif task == "logits":
                compare_logprobs(job, args.ranks, failures)
            elif task == "measure":
                measure_ranks(name, job, args.ranks, rows)
            else:
                handoffs = run(replace(job, task="handoff"))
                rows += [{"model": name, **row} for row in handoffs]
                print_handoffs(handoffs)
        except RuntimeError as error:
            failures.append(f"{name} {task}: {error}")
        sys.stdout.flush()
    return rows


def main() -> int:
    """Do the tasks; returns 1 if something was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=NAMES, default=["qwen3-8b"])
    parser.add_argument("--layers", type=int, help="use only so many layers of each shape")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--prefill-sizes", nargs="+", default=["8x16", "8x64", "8x128", "8x512", "8x1024"])
    parser.add_argument("--decode-sizes", nargs="+", default=["8x1024", "64x1024"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--time-limit-s", type=float, default=400.0, help="give a task up after so long")
    parser.add_argument("--compile-cache", default=str(Path.home() / ".cache/purefill/compiled"))
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job is not None:
        result = work(pickle.load(sys.stdin.buffer), args.job)
        if args.job:
            Path(args.job).write_bytes(pickle.dumps(result))
        sys.stderr.flush()
        # Threads that wait in torch, and other ranks that are gone, would be in the way of an orderly end.
        os._exit(0)
    rows: list[Row] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            print(f"{name}:", flush=True)
            rows += bench_model(name, Path(folder), args, failures)
            if args.out:
                args.out.write_text(json.dumps(rows, indent=1))
    for failure in failures:
        print("FAILED", failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
