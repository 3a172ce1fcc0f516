"""What the processes of the benchmark of tensor parallelism do: make tokens, logprobs and times."""

from __future__ import annotations

import json
import os
import pickle
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from decode_step import start_sequences, time_steps
from prefill_checks import relative_error
from ranks import Job, start

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
from worker.kv_pool import KVPool
from worker.model import Model, ModelSource, load_reference
from worker.parallel.group import ShardGroup
from worker.prefill import PrefillEngine

WARM_UP = 4
DECODE = "decode-0"
CHECK_LENGTHS = (5, 40, 17, 33)
Row = dict[str, Any]


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
    spec = (model.kv_spec, num_pages, page_size)
    reading, writing = os.pipe()
    owner = start(replace(job, task="pool", rank=1, pool=spec), str(writing), pass_fds=(writing,))
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        handle: PoolHandle = pickle.load(file)
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
    """Be a decode worker that has pages, and nothing else, until the other process is gone.

    `out` is the descriptor to which its handle goes.
    """
    assert job.pool is not None
    spec, count, page_size = job.pool
    device = torch.device(job.config.device)
    pool, handle = KVPool.create(spec, name=DECODE, num_pages=count, page_size=page_size, device=device)
    receiver = Receiver(pool, name=DECODE, host="127.0.0.1")
    with os.fdopen(int(out), "wb") as file:
        pickle.dump(replace(handle, endpoint=receiver.endpoint), file)
    sys.stdin.buffer.read()
    # Threads that wait in torch would be in the way of an orderly end.
    os._exit(0)
