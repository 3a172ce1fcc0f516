"""Our front against Ray Serve's `@serve.batch`, both real: what each adds to a request, and how many it sustains.

A client actor sends prompts of token ids. With purefill they go, as from an ApiServer, to the Scheduler actor,
which forms batches and sends them to a stub prefill worker, which sends the first tokens to the client. With Serve
they go to a deployment that gathers them with `@serve.batch` and answers. Neither has HTTP in its way, and both
stubs take the same time. Needs `pip install 'ray[serve]'`.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import ray

from benchmarks import h200
from benchmarks.hops import NoDecode
from scheduler.actor import Scheduler, SchedulerConfig
from scheduler.admission import Admission
from scheduler.api.scheduler_client import SchedulerClient
from scheduler.core import QueueLimits
from scheduler.messages import (
    RAY_NAMESPACE,
    SCHEDULER_NAME,
    DecodeWorkerInfo,
    ModelInfo,
    PoolHandle,
    PrefillBatch,
    PrefillOutcome,
    PrefillResult,
    PrefillWorkerInfo,
    Request,
    SamplingParams,
    TokenEvent,
    TokenEvents,
)
from scheduler.observe.registry import Registry
from scheduler.workers import create_actor

_CLIENT = "bench-client"
_PREFILL = "prefill-0"
_MODEL = ModelInfo(
    name="stub",
    max_model_len=1 << 20,
    vocab_size=1 << 20,
    eos_token_ids=(0,),
    dtype="bfloat16",
    num_parameters=1,
)
Call = Callable[[tuple[int, ...]], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one run gave."""

    ttft_s: tuple[float, ...]
    """Time to first token of each request, ascending."""
    seconds: float
    cpu_s: float
    """CPU seconds of all processes that had a part in it, client and stub included."""

    def quantile(self, q: float) -> float:
        """Return the time to first token that the share `q` of the requests did not exceed."""
        return self.ttft_s[min(len(self.ttft_s) - 1, int(q * len(self.ttft_s)))]

    @property
    def requests_per_s(self) -> float:
        """Requests answered per second."""
        return len(self.ttft_s) / self.seconds

    @property
    def cpu_us(self) -> float:
        """CPU microseconds per request."""
        return 1e6 * self.cpu_s / len(self.ttft_s)


_LIMITS = QueueLimits(max_requests=10**6, max_tokens=10**9)
_COST_MODEL = h200.qwen3_8b()


def _stub_seconds(num_tokens: int, *, is_free: bool) -> float:
    return 0.0 if is_free else _COST_MODEL.seconds(num_tokens)


class Player:
    """Sends prompts and measures the time to the answer. Shared by both client actors."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._ttft_s: list[float] = []

    async def open_loop(self, arrivals: Sequence[tuple[float, int]]) -> Sequence[float]:
        """Send each prompt at its time, whatever became of the others."""
        self._ttft_s = []
        start = time.perf_counter()
        tasks = []
        for at, num_tokens in arrivals:
            delay = start + at - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            # Late by the client's own doing or not: it counts from when it should have been sent.
            tasks.append(asyncio.ensure_future(self._send(num_tokens, start + at)))
        await asyncio.gather(*tasks)
        return self._ttft_s

    async def closed_loop(self, num_tokens: int, concurrency: int, seconds: float) -> Sequence[float]:
        """Keep `concurrency` prompts under way for so long."""
        self._ttft_s = []
        end = time.perf_counter() + seconds

        async def keep_sending() -> None:
            while (now := time.perf_counter()) < end:
                await self._send(num_tokens, now)

        await asyncio.gather(*(keep_sending() for _ in range(concurrency)))
        return self._ttft_s

    async def _send(self, num_tokens: int, sent_at: float) -> None:
        await self._call(_prompt(num_tokens))
        self._ttft_s.append(time.perf_counter() - sent_at)


_PROMPTS: dict[int, tuple[int, ...]] = {}


def _prompt(num_tokens: int) -> tuple[int, ...]:
    if num_tokens not in _PROMPTS:
        _PROMPTS[num_tokens] = tuple(range(1, num_tokens + 1))
    return _PROMPTS[num_tokens]


# purefill


class StubPrefill:
    """A prefill worker that computes nothing."""

    def __init__(self, is_free: bool) -> None:
        self._is_free = is_free
        self._client: Any = None

    def pid(self) -> int:
        """Return the process id."""
        return os.getpid()

    @ray.method(concurrency_group="life")
    def live(self) -> None:
        """Never return."""
        threading.Event().wait()

    def prefill(self, batch: PrefillBatch) -> PrefillResult:
        """Take the time of a batch, send its first tokens and report."""
        num_tokens = sum(item.request.num_prefill_tokens for item in batch.items)
        seconds = _stub_seconds(num_tokens, is_free=self._is_free)
        time.sleep(seconds)
        if self._client is None:
            self._client = ray.get_actor(_CLIENT, namespace=RAY_NAMESPACE)
        ids = [item.request.request_id for item in batch.items]
        events = tuple(
            TokenEvent(request_id=request_id, index=0, token_id=1, finish_reason="length")
            for request_id in ids
        )
        self._client.deliver.remote(TokenEvents(source=_PREFILL, events=events))
        return PrefillResult(
            batch_id=batch.batch_id,
            worker=_PREFILL,
            outcomes=tuple(
                PrefillOutcome(request_id=request_id, token_id=1, finish_reason="length")
                for request_id in ids
            ),
            num_tokens=num_tokens,
            padding_tokens=0,
            replays={},
            seconds=seconds,
        )


class MeasuredScheduler(Scheduler):
    """The real Scheduler, which also tells its process id."""

    async def pid(self) -> int:
        """Return the process id."""
        return os.getpid()


class PurefillClient:
    """Submits requests as an ApiServer does."""

    def __init__(self, name: str) -> None:
        scheduler = ray.get_actor(SCHEDULER_NAME, namespace=RAY_NAMESPACE)
        admission = Admission(max_requests=_LIMITS.max_requests, max_tokens=_LIMITS.max_tokens)
        self._client = SchedulerClient(
            scheduler, name=name, model=_MODEL, admission=admission, registry=Registry()
        )
        self._player = Player(self._call)
        self._num_sent = 0

    async def pid(self) -> int:
        """Return the process id."""
        return os.getpid()

    async def deliver(self, events: TokenEvents) -> None:
        """Take first tokens from the worker."""
        self._client.deliver(events)

    async def open_loop(self, arrivals: Sequence[tuple[float, int]]) -> Sequence[float]:
        """See `Player.open_loop`."""
        return await self._player.open_loop(arrivals)

    async def closed_loop(self, num_tokens: int, concurrency: int, seconds: float) -> Sequence[float]:
        """See `Player.closed_loop`."""
        return await self._player.closed_loop(num_tokens, concurrency, seconds)

    async def _call(self, prompt: tuple[int, ...]) -> None:
        self._num_sent += 1
        request = Request(
            request_id=f"r{self._num_sent}",
            api_server=_CLIENT,
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=1),
        )
        with self._client.admit(1, 0, len(prompt)):
            stream = await self._client.submit([request])
        await stream.read()


class Purefill:
    """The Scheduler actor with stub workers and a client."""

    def __init__(self, max_requests: int, timeout_s: float, *, policy: str, is_free: bool) -> None:
        decode = DecodeWorkerInfo(
            name="decode-0",
            model=_MODEL,
            pool=PoolHandle(
                decode_worker="decode-0",
                transport="stub",
                address="",
                incarnation=1,
                num_pages=200_000,
                page_size=256,
                size_bytes=0,
            ),
            max_num_seqs=100_000,
            device="stub",
            load_seconds=0.0,
            weights_bytes=0,
        )
        prefill = PrefillWorkerInfo(
            name=_PREFILL,
            model=_MODEL,
            buckets=(),
            graph_bytes=0,
            uses_cuda_graphs=False,
            bucket_seconds={
                f"{tokens}x{max_requests}": seconds for tokens, seconds in _COST_MODEL.table().items()
            },
            device="stub",
            load_seconds=0.0,
            warmup_seconds=0.0,
        )
        config = SchedulerConfig(
            batch_policy="adaptive" if policy == "adaptive" else "fixed",
            max_batch_requests=max_requests,
            batch_timeout_s=timeout_s,
            max_batch_tokens=None,
            queue_limits=_LIMITS,
            log_level="warning",
        )
        self._actors = [
            create_actor(NoDecode, "decode-0", "decode-0", max_concurrency=4),
            create_actor(StubPrefill, _PREFILL, is_free, groups={"life": 1}),
            create_actor(MeasuredScheduler, SCHEDULER_NAME, config),
        ]
        ray.get(self._actors[2].start.remote((decode,), (prefill,)))
        self.client = create_actor(PurefillClient, _CLIENT, _CLIENT)
        self._actors.append(self.client)
        self.pids = [ray.get(actor.pid.remote()) for actor in self._actors[1:]]

    def close(self) -> None:
        """Stop the actors."""
        for actor in reversed(self._actors):
            ray.kill(actor)


# Ray Serve


class ServeClient:
    """Calls a deployment."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._player = Player(self._call)

    async def pid(self) -> int:
        """Return the process id."""
        return os.getpid()

    async def open_loop(self, arrivals: Sequence[tuple[float, int]]) -> Sequence[float]:
        """See `Player.open_loop`."""
        return await self._player.open_loop(arrivals)

    async def closed_loop(self, num_tokens: int, concurrency: int, seconds: float) -> Sequence[float]:
        """See `Player.closed_loop`."""
        return await self._player.closed_loop(num_tokens, concurrency, seconds)

    async def _call(self, prompt: tuple[int, ...]) -> None:
        await self._handle.remote(prompt)


class ServeBatch:
    """A deployment with `@serve.batch` and a client."""

    def __init__(self, max_requests: int, timeout_s: float, *, is_free: bool) -> None:
        from ray import serve

        # Without its log line a request, to be fair.
        @serve.deployment(
            max_ongoing_requests=100_000,
            ray_actor_options={"num_cpus": 0},
            logging_config={"enable_access_log": False, "log_level": "WARNING"},
        )
        class Model:
            @serve.batch(max_batch_size=max_requests, batch_wait_timeout_s=timeout_s)
            async def first_tokens(self, prompts: list[tuple[int, ...]]) -> list[int]:
                seconds = _stub_seconds(sum(len(prompt) for prompt in prompts), is_free=is_free)
                if seconds:
                    await asyncio.sleep(seconds)
                return [1] * len(prompts)

            async def __call__(self, prompt: tuple[int, ...]) -> int:
                if not prompt:
                    return os.getpid()
                token: int = await self.first_tokens(prompt)
                return token

        serve.start(proxy_location="Disabled")
        handle = serve.run(Model.bind(), name="bench", route_prefix=None)
        replica_pid = handle.remote(()).result()
        self.client = create_actor(ServeClient, "serve-client", handle)
        self.pids = [replica_pid, ray.get(self.client.pid.remote())]

    def close(self) -> None:
        """Stop the deployment and the client."""
        from ray import serve

        ray.kill(self.client)
        serve.shutdown()


# Measuring


def closed_loop(system: Purefill | ServeBatch, concurrency: int, seconds: float) -> Measured:
    """Keep prompts of 64 tokens under way, after a short warm-up."""
    ray.get(system.client.closed_loop.remote(64, concurrency, 1.0))
    return _measured(system, lambda: system.client.closed_loop.remote(64, concurrency, seconds))


def open_loop(system: Purefill | ServeBatch, arrivals: Sequence[tuple[float, int]]) -> Measured:
    """Play a load, after a short warm-up."""
    ray.get(system.client.closed_loop.remote(64, 8, 1.0))
    return _measured(system, lambda: system.client.open_loop.remote(arrivals))


def _measured(system: Purefill | ServeBatch, start: Callable[[], Any]) -> Measured:
    cpu_s, began = _cpu_seconds(system.pids), time.perf_counter()
    ttft_s = ray.get(start())
    return Measured(
        ttft_s=tuple(sorted(ttft_s)),
        seconds=time.perf_counter() - began,
        cpu_s=_cpu_seconds(system.pids) - cpu_s,
    )


def _cpu_seconds(pids: Sequence[int]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(time.user + time.system for time in times)
