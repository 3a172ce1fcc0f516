"""What figures and traces cost of the time of scheduler, ApiServer and decode worker; a scrape of 50 workers.

The scheduler's core and the generation code of an ApiServer do the same work with the figures and with an observer or a
registry that counts nothing, in turns; the least CPU time of each counts. Nothing of HTTP, Ray, a tokenizer or a model
is in it, so the shares are more than the figures have of these processes in a service.

    python -m benchmarks.metrics_overhead
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import pickle
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from scheduler.actions import SendDecodeStarts, SendPrefill
from scheduler.admission import Admission, Permit
from scheduler.api.completion_protocol import CompletionRequest
from scheduler.api.engine import TokenRouter, TokenStream
from scheduler.api.generation import GenerationStarter
from scheduler.api.prompts import PromptEncoder
from scheduler.batching.cost_model import CostModel
from scheduler.batching.former import BatchFormer
from scheduler.batching.policies import FixedPolicy
from scheduler.core import QueueLimits, SchedulerCore
from scheduler.messages import (
    DecodeStart,
    DecodeWorkerInfo,
    HandoffResult,
    ModelInfo,
    PoolHandle,
    PrefillOutcome,
    PrefillResult,
    PrefillWorkerInfo,
    Request,
    SamplingParams,
    SequenceRef,
    StepReport,
    Timing,
    TokenEvent,
    TokenEvents,
)
from scheduler.metrics import SchedulerMetrics
from scheduler.observe.exposition import render
from scheduler.observe.registry import Registry
from scheduler.observe.requests import RequestTimeline
from scheduler.observe.traces import OtelRecorder
from scheduler.observe.workers import count_step

_BATCH, _PROMPT_TOKENS, _OUTPUT_TOKENS = 8, 64, 16
_STEP_S = 0.0055
"""A decode step of 64 sequences of 1,024 tokens of Qwen3-8B on an H200: docs/decode.md."""
_MODEL = ModelInfo(
    name="bench", max_model_len=4096, vocab_size=999, eos_token_ids=(0,), dtype="bfloat16", num_parameters=1
)


class SilentObserver:
    """An observer that counts nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _nothing


class DeafRegistry(Registry):
    """A registry that counts nothing."""

    inc = observe = lambda *_, **__: None  # type: ignore[assignment]


def _nothing(*_: object) -> None:
    pass


class Rig:
    """A scheduler's core, and workers that do their part at once."""

    def __init__(self, observer: Any, num_workers: int) -> None:
        cost_model = CostModel.proportional([512])
        policy = FixedPolicy(max_requests=_BATCH, timeout_s=1.0, cost_model=cost_model)
        limits = QueueLimits(max_requests=10**6, max_tokens=10**9)
        self.core = SchedulerCore(BatchFormer(policy, cost_model), limits, observer)
        for i in range(num_workers):
            self.core.add_prefill_worker(_prefill_info(f"prefill-{i}"))
            self.core.add_decode_worker(_decode_info(f"decode-{i}"))
        self._numbers = {f"decode-{i}": count(1) for i in range(num_workers)}
        self._ids = count()

    def run(self, num_batches: int) -> float:
        """Take batches of requests to their ends; return the CPU seconds per request."""
        started = time.process_time()
        for batch in range(num_batches):
            self._run_batch(float(batch))
        assert self.core.num_live == 0
        return (time.process_time() - started) / num_batches / _BATCH

    def _run_batch(self, now: float) -> None:
        core = self.core
        for _ in range(_BATCH):
            core.submit([_request(str(next(self._ids)))], now)
        (send,) = [action for action in core.tick(now) if isinstance(action, SendPrefill)]
        core.prefill_done(_prefill_result(send), now + 0.01)
        (sent,) = [action for action in core.tick(now + 0.01) if isinstance(action, SendDecodeStarts)]
        for index in range(1, _OUTPUT_TOKENS):
            core.step_done(step_report(sent, index, next(self._numbers[sent.worker])), now + 0.02)
            core.tick(now + 0.02)


def step_report(sent: SendDecodeStarts, index: int, number: int) -> StepReport:
    """Return what a decode worker reports of the step that makes token `index` of its sequences."""
    is_last = index + 1 == _OUTPUT_TOKENS
    return StepReport(
        worker=sent.worker,
        seconds=_STEP_S,
        events=tuple(_event(start, index, is_last=is_last) for start in sent.starts),
        released=tuple(
            SequenceRef(request_id=start.request.request_id, epoch=start.lease.epoch)
            for start in sent.starts
            if is_last
        ),
        bucket="8x8",
        number=number,
    )


def _event(start: DecodeStart, index: int, *, is_last: bool) -> TokenEvent:
    return TokenEvent(
        request_id=start.request.request_id,
        index=index,
        epoch=start.lease.epoch,
        token_id=5,
        finish_reason="length" if is_last else None,
    )


def _request(request_id: str) -> Request:
    sampling = SamplingParams(max_tokens=_OUTPUT_TOKENS)
    prompt = (7,) * _PROMPT_TOKENS
    return Request(request_id=request_id, api_server="api-0", prompt_token_ids=prompt, sampling=sampling)


def _prefill_result(send: SendPrefill) -> PrefillResult:
    batch_id, worker = send.batch.batch_id, send.worker
    return PrefillResult(
        batch_id=batch_id,
        worker=worker,
        outcomes=tuple(
            PrefillOutcome(request_id=item.request.request_id, token_id=5) for item in send.batch.items
        ),
        num_tokens=_BATCH * _PROMPT_TOKENS,
        padding_tokens=0,
        replays={"512x8": 1},
        seconds=0.01,
        flops=1e12,
        handoff=HandoffResult(
            batch_id=batch_id,
            worker=worker,
            transport="cuda_ipc",
            failures=(),
            num_bytes=10**6,
            seconds=1e-4,
        ),
    )


def _prefill_info(name: str) -> PrefillWorkerInfo:
    return PrefillWorkerInfo(
        name=name,
        model=_MODEL,
        buckets=(),
        graph_bytes=0,
        uses_cuda_graphs=True,
        bucket_seconds={},
        device="cuda",
        load_seconds=0.0,
        warmup_seconds=0.0,
        peak_flops=989e12,
    )


def _decode_info(name: str) -> DecodeWorkerInfo:
    pool = PoolHandle(
        decode_worker=name,
        transport="cuda_ipc",
        address="",
        incarnation=1,
        num_pages=4096,
        page_size=32,
        size_bytes=0,
    )
    return DecodeWorkerInfo(
        name=name,
        model=_MODEL,
        pool=pool,
        max_num_seqs=64,
        device="cuda",
        load_seconds=0.0,
        weights_bytes=0,
    )


class ScriptedEngine:
    """The engine of an ApiServer whose tokens come one at a time, each with the next turn of the event loop."""

    name, model = "api-0", _MODEL

    def __init__(self) -> None:
        self._router = TokenRouter()
        self._admission = Admission(max_requests=10**6, max_tokens=10**9)

    def admit(self, num_requests: int, num_chars: int, num_tokens: int) -> Permit:
        """Let everything begin."""
        return self._admission.admit_text(num_requests, num_chars, 0.0, num_tokens=num_tokens)

    async def submit(self, requests: Sequence[Request]) -> TokenStream:
        """Begin to send tokens."""
        stream = self._router.open([request.request_id for request in requests])
        asyncio.get_running_loop().call_soon(self._step, requests, 0)
        return stream

    def _step(self, requests: Sequence[Request], index: int) -> None:
        is_last = index + 1 == _OUTPUT_TOKENS
        self._router.deliver(
            TokenEvents(
                source="decode-0",
                events=tuple(
                    TokenEvent(
                        request_id=request.request_id,
                        index=index,
                        token_id=5,
                        finish_reason="length" if is_last else None,
                    )
                    for request in requests
                ),
            )
        )
        if not is_last:
            asyncio.get_running_loop().call_soon(self._step, requests, index + 1)

    async def cancel(self, request_ids: Sequence[str]) -> None:
        """Nothing runs that could be cancelled."""


def stream_requests(registry: Registry, num_requests: int) -> float:
    """Stream answers as an ApiServer does, from the parsed body to the text of each event; return CPU seconds each."""
    engine: Any = ScriptedEngine()
    encoder = PromptEncoder(_MODEL, None, None)
    starter = GenerationStarter(engine, encoder, None, ("bench",), registry=registry)
    body = CompletionRequest.model_validate(
        {
            "model": "bench",
            "prompt": [7] * _PROMPT_TOKENS,
            "max_tokens": _OUTPUT_TOKENS,
            "stream": True,
        }
    )

    async def run() -> None:
        for _ in range(num_requests):
            generation = await starter.start(body)
            async for _frame in generation.frames():
                pass
            await generation.close()

    started = time.process_time()
    asyncio.run(run())
    return (time.process_time() - started) / num_requests


def least(one: Callable[[], float], other: Callable[[], float], rounds: int) -> tuple[float, float]:
    """Return the least of two measurements, made in turns."""
    pairs = [(one(), other()) for _ in range(rounds)]
    return min(a for a, _ in pairs), min(b for _, b in pairs)


def report(what: str, with_figures: float, without: float, whole_us: float, where: str) -> None:
    """Print what the figures cost a request, next to what it costs the whole actor, from a measurement in docs/."""
    cost_us = 1e6 * (with_figures - without)
    print(
        f"{what}: {cost_us:.1f} us a request for the figures, {100 * cost_us / whole_us:.2f} % of the "
        f"{whole_us:.0f} us that it costs the actor ({where}); without Ray and HTTP {1e6 * without:.0f} us"
    )


def measure_step(rounds: int) -> float:
    """Return the CPU seconds of counting a decode step of 64 sequences."""
    events = tuple(TokenEvent(request_id=str(i), index=1, token_id=5) for i in range(64))
    step = StepReport(worker="decode-0", seconds=_STEP_S, events=events, released=(), bucket="64x64")
    registry, best = Registry(), float("inf")
    for _ in range(rounds):
        started = time.process_time()
        for _ in range(1000):
            count_step(registry, step)
        best = min(best, (time.process_time() - started) / 1000)
    return best


def measure_scrape(num_pairs: int, rounds: int) -> None:
    """Print what a scrape costs scheduler and ApiServer, with so many prefill and as many decode workers."""
    metrics = SchedulerMetrics()
    rig = Rig(metrics, num_pairs)
    rig.run(4 * num_pairs)
    gather: list[float] = []
    write: list[float] = []
    for _ in range(rounds):
        started = time.perf_counter()
        message = pickle.dumps(metrics.figures(rig.core), protocol=5)
        gather.append(time.perf_counter() - started)
        started = time.perf_counter()
        text = render(pickle.loads(message), {"model": "bench"})
        write.append(time.perf_counter() - started)
    print(
        f"scrape, {2 * num_pairs} workers: {1e3 * min(gather):.1f} ms of the scheduler, {1e3 * min(write):.1f} ms of "
        f"the ApiServer in a thread; {len(message) / 1e3:.0f} kB between them, {text.count(chr(10))} lines, "
        f"{len(text) / 1e3:.0f} kB"
    )


def measure_traces(num_requests: int) -> None:
    """Print what the spans of a request cost an ApiServer, if all requests are sampled."""
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Encoder(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            encode_spans(spans).SerializeToString()
            return SpanExportResult.SUCCESS

    timeline = RequestTimeline(Registry(), 0.0)
    timeline.submitted([_PROMPT_TOKENS], 0.001)
    timing = Timing(queued_s=0.01, held_s=0.01, prefill_s=0.01)
    timeline.event(0, TokenEvent(request_id="r", index=0, token_id=5, timing=timing), 0.1)
    timeline.event(0, TokenEvent(request_id="r", index=1, token_id=5, timing=Timing(handoff_s=0.001)), 0.2)
    timeline.ended(0, "length", 0.3)
    recorder, in_loop = OtelRecorder(Encoder(), model="bench", api_server="api-0"), 0.0
    started = time.process_time()
    for number in range(num_requests):
        before = time.thread_time()
        recorder.record(timeline, name="POST /v1/completions", answer_id="a", status=200, headers={})
        in_loop += time.thread_time() - before
        if number % 100 == 99:
            time.sleep(0.1)  # as long as the thread that sends needs: it drops what it cannot keep
    recorder.close()
    whole_us = 1e6 * (time.process_time() - started) / num_requests
    print(
        f"traces: {1e6 * in_loop / num_requests:.0f} us a request in the ApiServer's loop, "
        f"{whole_us:.0f} us with the thread that encodes and sends: {whole_us / 22.5:.1f} % of 2250 us"
    )


def main() -> None:
    """Print all costs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=25, help="measurements of each, of which the least counts"
    )
    rounds: int = parser.parse_args().rounds
    logging.disable(logging.INFO)
    counted, silent = least(
        lambda: Rig(SchedulerMetrics(), 4).run(100),
        lambda: Rig(SilentObserver(), 4).run(100),
        rounds,
    )
    report("Scheduler", counted, silent, 681, "docs/batching.md, which has no decode steps in it")
    heard, deaf = least(
        lambda: stream_requests(Registry(), 200),
        lambda: stream_requests(DeafRegistry(), 200),
        rounds,
    )
    report("ApiServer", heard, deaf, 2250, "docs/api.md, of 16 tokens")
    step = measure_step(rounds)
    print(
        f"{'decode step of 64':<22}{1e6 * step:.1f} us, {100 * step / _STEP_S:.2f} % of {1e3 * _STEP_S:g} ms"
    )
    measure_scrape(25, rounds)
    measure_traces(2000)


if __name__ == "__main__":
    main()
