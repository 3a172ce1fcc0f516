"""What a second batch in flight is worth: requests per second of one prefill worker that always has enough to do.

The real Scheduler and PrefillWorker with a stub in place of the device, which takes a fixed time for each batch, one
after the other. A client keeps as many requests waiting as four batches hold, over sockets. Blocks with one and with
two batches in flight take turns in one run. The bound is what the device alone allows.

    python -m benchmarks.ahead --batch-ms 10 --seconds 3
    python -m benchmarks.ahead --simulate       # the same question on a virtual H200, with TTFT at several loads
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import itertools
import json
import os
import statistics
import time
from collections import defaultdict
from typing import Any

import ray

from benchmarks.hops import (
    BURST,
    LIMITS,
    MODEL,
    NoDecode,
    NoEngine,
    TimedPrefillWorker,
    TimedScheduler,
    decode_info,
    worker_config,
)
from scheduler import prefill_workers
from scheduler.actor import SchedulerConfig
from scheduler.admission import Admission
from scheduler.api.scheduler_client import SchedulerClient
from scheduler.cli import main as run_command
from scheduler.messages import (
    RAY_NAMESPACE,
    SCHEDULER_NAME,
    PoolHandle,
    PrefillBatch,
    PrefillResult,
    PrefillWorkerInfo,
    Request,
    SamplingParams,
    TokenEvents,
)
from scheduler.observe.registry import Registry
from scheduler.wire import AsyncioReactor, Wire, serve_actor
from scheduler.workers import create_actor

_BLOCKS = 3


class OnDevice:
    """A batch that a device computes until a moment."""

    def __init__(self, result: PrefillResult, ends_at: float) -> None:
        self._result = result
        self._ends_at = ends_at

    def result(self) -> PrefillResult:
        """Wait for it."""
        time.sleep(max(0.0, self._ends_at - time.perf_counter()))
        return self._result


class SlowEngine(NoEngine):
    """Takes the same time for each batch, and one batch after the other."""

    def __init__(self, batch_s: float) -> None:
        self._batch_s = batch_s
        self._free_at = 0.0

    def start(self, batch: PrefillBatch) -> Any:
        """Compute nothing."""
        self._free_at = max(self._free_at, time.perf_counter()) + self._batch_s
        return OnDevice(self.result_of(batch, self._batch_s), self._free_at)


class SlowPrefillWorker(TimedPrefillWorker):
    """The real one, with that engine."""

    def _load_and_open(self, pools: tuple[PoolHandle, ...]) -> PrefillWorkerInfo:
        info = super()._load_and_open(pools)
        self._engine = SlowEngine(self._config.batch_s)  # type: ignore[assignment, attr-defined]
        return info


class AheadScheduler(TimedScheduler):
    """The real one, which can be told how many batches a worker may have."""

    async def allow(self, max_batches: int) -> None:
        """Let each worker have so many batches in flight."""
        self._core._prefill._placement._max_batches = max_batches


class Client:
    """Submits requests as an ApiServer does."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._number = 0

    async def begin(self) -> None:
        """Introduce itself."""
        reactor = AsyncioReactor()
        wire = Wire(reactor)
        self._client = SchedulerClient(
            wire.handle(SCHEDULER_NAME),
            name=self._name,
            model=MODEL,
            admission=Admission(max_requests=LIMITS.max_requests, max_tokens=LIMITS.max_tokens),
            registry=Registry(),
            short_way=wire.peer(SCHEDULER_NAME),
        )
        self._server = serve_actor(self._name, reactor, {"deliver": self._client.deliver})
        await self._client.join()

    async def deliver(self, events: TokenEvents) -> None:
        """Take tokens that come by Ray."""
        self._client.deliver(events)

    async def load(self, count: int, seconds: float) -> float:
        """Keep `count` requests under way; return how many were answered in a second."""
        ends_at = time.perf_counter() + seconds
        num_answered = 0

        async def ask_on() -> None:
            nonlocal num_answered
            while time.perf_counter() < ends_at:
                self._number += 1
                request = Request(
                    request_id=f"r{self._number}",
                    api_server=self._name,
                    prompt_token_ids=(1,) * 16,
                    sampling=SamplingParams(max_tokens=1),
                )
                await (await self._client.submit([request])).read()
                num_answered += 1

        await asyncio.gather(*(ask_on() for _ in range(count)))
        return num_answered / seconds


def measure(batch_s: float, seconds: float) -> dict[int, float]:
    """Return the median of requests per second with one and with two batches in flight."""
    prefill = create_actor(
        SlowPrefillWorker, "prefill-0", worker_config(batch_s=batch_s), groups={"handoff": 8, "life": 1}
    )
    decode = create_actor(NoDecode, "decode-0", "decode-0", max_concurrency=4)
    info = decode_info()
    scheduler = create_actor(
        AheadScheduler,
        SCHEDULER_NAME,
        SchedulerConfig(
            batch_policy="fixed",
            max_batch_requests=BURST,
            batch_timeout_s=0.5,
            max_batch_tokens=None,
            queue_limits=LIMITS,
        ),
    )
    ray.get(scheduler.start.remote((info,), (ray.get(prefill.load.remote((info.pool,))),)))
    client = create_actor(Client, "api-0", "api-0")
    ray.get(client.begin.remote())
    ray.get(client.load.remote(4 * BURST, 1.0))
    rates = defaultdict(list)
    for _ in range(_BLOCKS):
        for max_batches in (1, 2):
            ray.get(scheduler.allow.remote(max_batches))
            rates[max_batches].append(ray.get(client.load.remote(4 * BURST, seconds)))
    ray.kill(decode)
    return {max_batches: statistics.median(values) for max_batches, values in rates.items()}


def simulate() -> None:
    """Print the TTFT of prompts of 64 tokens in the simulator, with one and with two batches in flight."""
    for model, rates in (("h200-qwen3-0.6b", (300, 1200, 2400)), ("h200-qwen3-8b", (100, 250, 320))):
        for policy, rate in itertools.product(("fixed", "adaptive"), rates):
            cells = []
            for max_batches in (1, 2):
                prefill_workers._MAX_BATCHES = max_batches
                said = io.StringIO()
                options = f"--max-num-seqs 256 --json --cost-model {model} --batch-policy {policy}"
                load = f"poisson:rate={rate},requests=5000,prompt=64,output=2"
                with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
                    run_command(["simulate", "--trace", load, *options.split()])
                ttft = json.loads(said.getvalue())["ttft_ms"]
                cells.append(f"{ttft['p50']:7.1f} {ttft['p99']:7.1f}")
            print(f"{model:<16}{policy:<9}{rate:>5}/s   TTFT ms p50, p99:   one{cells[0]}   two{cells[1]}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch-ms", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each block")
    parser.add_argument("--simulate", action="store_true")
    arguments = parser.parse_args()
    if arguments.simulate:
        simulate()
        return
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(address="local", namespace=RAY_NAMESPACE, include_dashboard=False, log_to_driver=False)
    bound = BURST / arguments.batch_ms * 1e3
    for max_batches, rate in measure(arguments.batch_ms / 1e3, arguments.seconds).items():
        print(
            f"{max_batches} in flight: {rate:7.0f} requests/s, {rate / bound:.2f} of the device's {bound:.0f}"
        )
    ray.shutdown()


if __name__ == "__main__":
    main()
