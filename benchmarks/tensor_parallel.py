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
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from decode_step import num_pages, start_sequences, time_steps
from prefill_checks import relative_error
from shapes import NAMES, write_shape
from transformers import AutoConfig

from scheduler.messages import (
    DecodeStart,
    Lease,
    PoolHandle,
    PrefillBatch,
    PrefillItem,
    Request,
    SamplingParams,
    WorkerConfig,
)
from worker import startup
from worker.decode import DecodeEngine
from worker.engines import make_decode, make_pool, make_prefill
from worker.handoff.receiver import Receiver
from worker.kv_pool import KVPool, KVSpec
from worker.model import Model, ModelSource, load_reference
from worker.parallel.follower import follow
from worker.parallel.group import ShardGroup, lead_group
from worker.parallel.link import Meeting
from worker.prefill import PrefillEngine

WARM_UP = 4
DECODE = "decode-0"
TASKS = ("check", "measure", "logits", "handoff")
CHECK_LAYERS = 4
CHECK_LENGTHS = (5, 40, 17, 33)
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a process of its own does."""

    task: str
    config: WorkerConfig
    prefill_sizes: Sequence[str]
    decode_sizes: Sequence[str]
    steps: int
    repeats: int
    is_silent: bool = False
    """Ranks say nothing to each other, and compute something else than the model."""
    rank: int = 0
    meeting: Meeting | None = None
    pool: tuple[KVSpec, int, int] | None = None
    """Of the pages to own: their shape, how many they are, tokens of each."""


def run(job: Job) -> Any:
    """Return what a task gives, in a process of its own that leads the others."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result"
        process = start(job, str(out))
        if process.wait() != 0:
            raise RuntimeError(f"{job.task} with {job.config.tensor_parallel_size} ranks failed")
        return pickle.loads(out.read_bytes())


def start(job: Job, out: str = "") -> subprocess.Popen[bytes]:
    """Start a process for a rank's part of a job, which sees the rank's GPU only."""
    known = os.environ.get("PUREFILL_BENCH_GPUS") or os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = known.split(",") if known else [str(i) for i in range(16)]
    env = {**os.environ, "PUREFILL_BENCH_GPUS": ",".join(gpus), "CUDA_VISIBLE_DEVICES": gpus[job.rank]}
    # Of no use to so few GPUs, and not everywhere to be had.
    env.setdefault("NCCL_NVLS_ENABLE", "0")
    process = subprocess.Popen(
        [sys.executable, __file__, "--job", out], stdin=subprocess.PIPE, stdout=sys.stderr, env=env
    )
    assert process.stdin is not None
    pickle.dump(job, process.stdin)
    process.stdin.flush()
    return process


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


def silence() -> None:
    """Leave out what ranks say to each other in a pass."""

    def gather(_: ShardGroup, gathered: torch.Tensor, tensor: torch.Tensor) -> None:
        gathered.copy_(tensor.expand_as(gathered))

    ShardGroup.all_reduce = lambda *_: None  # type: ignore[method-assign]
    ShardGroup.broadcast = lambda *_: None  # type: ignore[method-assign]
    ShardGroup.gather = gather  # type: ignore[method-assign]


def make_engines(
    prefill_model: Model, decode_model: Model, config: WorkerConfig
) -> tuple[PrefillEngine, DecodeEngine, KVPool]:
    """Return both engines, of one process or of a group each."""
    pool, handle = make_pool(decode_model, config)
    prefill = make_prefill(prefill_model, replace(config, name="prefill-0"), node_id="")
    prefill.attach(handle)
    decode, _ = make_decode(decode_model, pool, config)
    return prefill, decode, pool


def make_batch(prompts: Sequence[Sequence[int]], page_size: int, max_tokens: int = 1) -> PrefillBatch:
    """Return a batch of prompts, each with pages of its own."""
    epoch, next_page, items = time.monotonic_ns(), 1, []
    for i, prompt in enumerate(prompts):
        count = -(-(len(prompt) + max_tokens) // page_size)
        request = Request(
            request_id=str(i),
            api_server="api-0",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        )
        lease = Lease(decode_worker=DECODE, epoch=epoch, page_ids=tuple(range(next_page, next_page + count)))
        items.append(PrefillItem(request=request, lease=lease))
        next_page += count
    return PrefillBatch(batch_id=1, decode_worker=DECODE, items=tuple(items))


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int) -> list[list[int]]:
    """Return prompts of these lengths."""
    numbers = random.Random(seed)
    return [[numbers.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


def check(job: Job, group: ShardGroup | None) -> dict[str, list[list[int]]]:
    """Return greedy tokens, by which engines are groups; of one process, those of one."""
    alone = replace(job.config, tensor_parallel_size=1)
    if group is None:
        model = startup.load(alone)
        return {"one process": generate(*make_engines(model, model, alone))}
    parts, whole = startup.load(job.config, group), startup.load(alone)
    splits = {
        "prefill and decode of two ranks": (parts, parts),
        "prefill of two, decode of one": (parts, whole),
        "prefill of one, decode of two": (whole, parts),
    }
    return {name: generate(*make_engines(*models, job.config)) for name, models in splits.items()}


def generate(prefill: PrefillEngine, decode: DecodeEngine, pool: KVPool) -> list[list[int]]:
    """Return 16 greedy tokens after each of four prompts."""
    prompts = random_prompts(CHECK_LENGTHS, prefill.model.info.vocab_size, seed=0)
    batch = make_batch(prompts, pool.page_size, max_tokens=16)
    outcomes = prefill.run(batch).outcomes
    tokens = {outcome.request_id: [outcome.token_id] for outcome in outcomes}
    for item, outcome in zip(batch.items, outcomes, strict=True):
        assert outcome.token_id is not None, outcome.error_message
        decode.add(DecodeStart(request=item.request, lease=item.lease, first_token_id=outcome.token_id))
    while decode.has_work:
        for _, event in decode.step().events:
            tokens[event.request_id].append(event.token_id)
    return [[token or 0 for token in made] for made in tokens.values()]


def logprobs(job: Job, group: ShardGroup | None) -> list[tuple[int, int, list[tuple[int, float]]]]:
    """Return (prompt, place, likeliest tokens with their logprobs) after each token of four prompts.

    Those after a last token come from the graph, the others from passes without.
    """
    model = startup.load(job.config, group)
    pool, handle = make_pool(model, job.config)
    engine = make_prefill(model, replace(job.config, name="prefill-0"), node_id="")
    engine.attach(handle)
    prompts = random_prompts(CHECK_LENGTHS, model.info.vocab_size, seed=0)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, num_logprobs=20, prompt_logprobs=True)
    batch = make_batch(prompts, pool.page_size)
    items = [replace(item, request=replace(item.request, sampling=sampling)) for item in batch.items]
    found = []
    for number, outcome in enumerate(engine.run(replace(batch, items=tuple(items))).outcomes):
        assert outcome.logprobs is not None, outcome.error_message
        assert outcome.prompt_logprobs is not None
        entries = [*outcome.prompt_logprobs[1:], outcome.logprobs]
        found += [
            (number, place, list(entry.top)) for place, entry in enumerate(entries) if entry is not None
        ]
    return found


@torch.inference_mode()
def reference(job: Job, _: ShardGroup | None) -> list[torch.Tensor]:
    """Return the logprobs after each token of the prompts, ``[T, V]`` each, of the same weights in float32."""
    config = job.config
    source = ModelSource(
        name=config.model_name,
        folder=Path(config.model_folder),
        dtype=config.dtype,
        load_format="dummy",
        device=config.device,
    )
    own = load_reference(source, attention="sdpa").to(torch.float32)  # type: ignore[arg-type]
    prompts = random_prompts(CHECK_LENGTHS, own.config.vocab_size, seed=0)
    inputs = [torch.tensor([prompt], device=own.device) for prompt in prompts]
    return [own(input_ids=ids, use_cache=False).logits[0].log_softmax(-1).cpu() for ids in inputs]


def measure(job: Job, group: ShardGroup | None) -> list[Row]:
    """Time prefill batches and decode steps."""
    started = time.perf_counter()
    model = startup.load(job.config, group)
    loaded = time.perf_counter()
    prefill, decode, pool = make_engines(model, model, job.config)
    what = {"ranks": job.config.tensor_parallel_size, "silent": job.is_silent}
    times = {"load_s": loaded - started, "prepare_s": time.perf_counter() - loaded}
    rows = [{**what, "size": "start", **times, "weights_gib": model.weights_bytes / 2**30}]
    for size in job.prefill_sizes:
        rows.append({**what, "size": f"prefill {size}", "ms": time_prefill(prefill, pool, size, job.repeats)})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    pool.memory.zero_()
    for size in job.decode_sizes:
        start_sequences(decode, pool, size, job.steps, model.info.vocab_size)
        gaps = time_steps(decode, job.steps)
        rows.append({**what, "size": f"decode {size}", "ms": statistics.median(gaps) * 1e3})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def time_prefill(engine: PrefillEngine, pool: KVPool, size: str, repeats: int) -> float:
    """Return the median milliseconds of a batch of new prompts."""
    count, length = map(int, size.split("x"))
    times = []
    for repeat in range(repeats + WARM_UP):
        batch = make_batch(
            random_prompts([length] * count, engine.model.info.vocab_size, seed=repeat), pool.page_size
        )
        started = time.perf_counter()
        result = engine.run(batch)
        times.append(time.perf_counter() - started)
        if result.handoff_pending:
            engine.handed_off(batch.batch_id)
        assert all(outcome.error_label is None for outcome in result.outcomes)
    return statistics.median(times[WARM_UP:]) * 1e3


def hand_off(job: Job, _: ShardGroup | None) -> list[Row]:
    """Time prefill into pages here, and into those of another device's process."""
    config = job.config
    model = startup.load(config)
    largest = max(
        count * length for count, length in (map(int, size.split("x")) for size in job.prefill_sizes)
    )
    page_size = startup.page_size(model)
    num_pages = 1 + 64 + largest // page_size
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "handle"
        os.mkfifo(out)
        spec = (model.kv_spec, num_pages, page_size)
        owner = start(replace(job, task="pool", rank=1, pool=spec), str(out))
        handle: PoolHandle = pickle.loads(out.read_bytes())
    local = KVPool.on_device(model.kv_spec, num_pages=num_pages, page_size=page_size, device=model.device)
    direct, by_message = ("shm", "gloo") if model.device.type == "cpu" else ("cuda_ipc", "nccl")
    rows, base_ms, content = [], {}, {}
    for transport in ("own pages", direct, by_message):
        wanted = "auto" if transport == "own pages" else transport
        engine = make_prefill(model, replace(config, name="prefill-0", handoff_transport=wanted), node_id="")
        if transport == "own pages":
            engine.attach_pool(DECODE, local)
        else:
            engine.attach(handle)
        for size in job.prefill_sizes:
            ms = time_prefill(engine, local, size, job.repeats)
            count, length = map(int, size.split("x"))
            batch = make_batch(random_prompts([length] * count, model.info.vocab_size, seed=0), page_size)
            result = engine.run(batch)
            handoff = engine.handed_off(1) if result.handoff_pending else result.handoff
            assert handoff is not None
            assert not handoff.failures, handoff.failures
            pages = [page for item in batch.items for page in item.lease.page_ids[: -(-length // page_size)]]
            there = local if transport == "own pages" else KVPool.open(model.kv_spec, handle, model.device)
            read = there.read_pages(pages).float()
            content.setdefault(size, read)
            base_ms.setdefault(size, ms)
            sent_ms = handoff.seconds * 1e3
            extra_ms = sent_ms if transport == by_message else ms - base_ms[size]
            rows.append(
                {
                    "transport": transport,
                    "size": size,
                    "ms": ms,
                    "mib": handoff.num_bytes / 2**20,
                    "extra_ms": extra_ms,
                    "share": extra_ms / base_ms[size],
                    "gb_per_s": handoff.num_bytes / (sent_ms if transport == by_message else ms) / 1e6,
                    "difference": relative_error(read, content[size]),
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    assert owner.stdin is not None
    owner.stdin.close()
    owner.wait()
    return rows


def own_pool(job: Job, out: str) -> None:
    """Be a decode worker that has pages, and nothing else, until the other process is gone."""
    assert job.pool is not None
    spec, count, page_size = job.pool
    device = torch.device(job.config.device)
    pool, handle = KVPool.create(spec, name=DECODE, num_pages=count, page_size=page_size, device=device)
    receiver = Receiver(pool, name=DECODE, host="127.0.0.1")
    Path(out).write_bytes(pickle.dumps(replace(handle, endpoint=receiver.endpoint)))
    sys.stdin.buffer.read()
    # Threads that wait in torch would be in the way of an orderly end.
    os._exit(0)


def compare_logprobs(own: list[torch.Tensor], found: dict[str, Any], failures: list[str]) -> None:
    """Print how far logprobs are from float32, and from those of one process."""
    errors = {}
    for name, entries in found.items():
        differences = [
            logprob - own[prompt][place, token].item()
            for prompt, place, top in entries
            for token, logprob in top
        ]
        errors[name] = statistics.fmean(d * d for d in differences) ** 0.5
        print(f"  {name}: logprobs of the 20 likeliest differ from float32 by {errors[name]:.2e} (RMS)")
    one, two = errors.values()
    if not two <= max(1.5 * one, 1e-4):
        failures.append(f"logprobs of the ranks err by {two:.2e}, of one process by {one:.2e}")


def check_tokens(config: WorkerConfig, job: Job, ranks: int, failures: list[str]) -> None:
    """Compare greedy tokens of groups with those of one process."""
    (expected,) = run(replace(job, task="check", config=replace(config, tensor_parallel_size=1))).values()
    made = run(replace(job, task="check", config=replace(config, tensor_parallel_size=ranks)))
    for name, tokens in made.items():
        print(f"  {name}: {'the same tokens' if tokens == expected else 'OTHER TOKENS'} in float32")
        if tokens != expected:
            failures.append(f"{name}: other tokens than one process")


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
    """Do the tasks with one model."""
    rows: list[Row] = []
    shape = write_shape(name, work_folder / "whole", num_layers=args.layers)
    config = make_config(name, shape, args)
    job = Job(
        task="",
        config=config,
        prefill_sizes=args.prefill_sizes,
        decode_sizes=args.decode_sizes,
        steps=args.steps,
        repeats=args.repeats,
    )
    if "check" in args.tasks:
        few = write_shape(name, work_folder / "few", num_layers=CHECK_LAYERS)
        small = replace(
            config, model_folder=str(few), dtype="float32", kv_memory_bytes=1 << 30, capture_tokens=(128,)
        )
        check_tokens(replace(small, max_num_seqs=4), job, args.ranks, failures)
    if "measure" in args.tasks:
        for ranks, is_silent in ((1, False), (args.ranks, False), (args.ranks, True)):
            one = replace(config, tensor_parallel_size=ranks)
            rows += [
                {"model": name, **row}
                for row in run(replace(job, task="measure", config=one, is_silent=is_silent))
            ]
        print_measured(rows)
    if "logits" in args.tasks:
        own = run(replace(job, task="reference"))
        short = replace(config, capture_tokens=(128,), max_num_seqs=8)
        found = {
            f"{ranks} process{'es' if ranks > 1 else ''}": run(
                replace(job, task="logprobs", config=replace(short, tensor_parallel_size=ranks))
            )
            for ranks in (1, args.ranks)
        }
        compare_logprobs(own, found, failures)
    if "handoff" in args.tasks:
        handoffs = run(replace(job, task="handoff"))
        rows += [{"model": name, **row} for row in handoffs]
        print_handoffs(handoffs)
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
    parser.add_argument("--compile-cache", default=str(Path.home() / ".cache/purefill/compiled"))
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job is not None:
        result = work(pickle.load(sys.stdin.buffer), args.job)
        if args.job:
            Path(args.job).write_bytes(pickle.dumps(result))
        return 0
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
