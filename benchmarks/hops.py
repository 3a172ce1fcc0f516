"""What the way there and back costs: bursts of prompts over HTTP through the real actors, by sockets and by Ray.

A real ApiServer, Scheduler and PrefillWorker serve bursts of eight prompts, each with one token to come; only the
engine is a stub, which computes nothing. So the time to a token is that of the way alone, and the batch is full with
the last prompt, so that nothing is held. Blocks of bursts in which the actors talk by their sockets take turns with
blocks in which all goes by Ray's calls. Printed are the medians of when each station was reached, and besides the
round trip of a message of a submission's size between two actors.

    python -m benchmarks.hops --bursts 100
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import queue
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import ray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from benchmarks.stream_client import StreamClient
from scheduler.actor import Scheduler, SchedulerConfig
from scheduler.api.app import AppSettings
from scheduler.api.scheduler_client import SchedulerClient
from scheduler.api.server import ApiServer, ApiServerConfig
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
)
from scheduler.wire import AsyncioReactor, RayPeer, Wire, serve_actor
from scheduler.workers import create_actor
from worker.events import EventSender
from worker.figures import WorkerFigures
from worker.prefill_actor import PrefillWorker
from worker.prefill_plan import Known

BURST = 8
_WAYS = ("ray", "wire")
_BLOCKS = 4
MODEL = ModelInfo(
    name="stub", max_model_len=4096, vocab_size=1000, eos_token_ids=(0,), dtype="bfloat16", num_parameters=1
)
LIMITS = QueueLimits(max_requests=1000, max_tokens=1_000_000)
_STATIONS = (
    "the last body is read",
    "the ApiServer submits",
    "the scheduler has it",
    "the batch has left",
    "the worker has it",
    "the ApiServer has the tokens",
    "the scheduler has the result",
)


class Stations:
    """Notes when something happened in this process. Clocks of one host's processes agree."""

    noted: list[tuple[str, float]] = []  # noqa: RUF012 (of the process)
    is_wired = True

    @classmethod
    def note(cls, station: str) -> None:
        """It happens now."""
        cls.noted.append((station, time.perf_counter()))

    @classmethod
    def take(cls) -> list[tuple[str, float]]:
        """Return what was noted, and forget it."""
        noted, cls.noted = cls.noted, []
        return noted


def _tell_before(owner: Any, method: str, station: str) -> None:
    """Have a method note a station before it does what it does."""
    original = getattr(owner, method)

    def noting(*args: Any, **kwargs: Any) -> Any:
        Stations.note(station)
        return original(*args, **kwargs)

    setattr(owner, method, noting)


def _watch_process() -> None:
    """Note the stations of this process, and let it be told which way its messages go."""
    connection = Wire._connection
    Wire._connection = lambda self, name: connection(self, name) if Stations.is_wired else None  # type: ignore[method-assign]
    _tell_before(SchedulerClient, "submit", "the last body is read")
    _tell_before(SchedulerClient, "_send_submissions", "the ApiServer submits")
    _tell_before(SchedulerClient, "deliver", "the ApiServer has the tokens")


class Timed:
    """What every actor here has besides."""

    def take_noted(self, way: str) -> list[tuple[str, float]]:
        """Return what was noted since the last call; from now on messages go this way."""
        Stations.is_wired = way == "wire"
        return Stations.take()


class TimedApiServer(ApiServer):
    """The real one."""

    def __init__(self, config: ApiServerConfig) -> None:
        _watch_process()
        super().__init__(config)

    async def take_noted(self, way: str) -> list[tuple[str, float]]:
        """See `Timed`."""
        return Timed.take_noted(self, way)  # type: ignore[arg-type]


class TimedScheduler(Scheduler):
    """The real one."""

    def __init__(self, config: SchedulerConfig) -> None:
        _watch_process()
        super().__init__(config)
        _tell_before(self._core, "submit", "the scheduler has it")
        _tell_before(self._core, "prefill_done", "the scheduler has the result")
        _tell_before(self, "_prefill", "the batch has left")

    async def take_noted(self, way: str) -> list[tuple[str, float]]:
        """See `Timed`."""
        return Timed.take_noted(self, way)  # type: ignore[arg-type]


class NoEngine:
    """Chooses token 1 for every prompt, at once."""

    is_decoding = False

    def start(self, batch: PrefillBatch) -> Known:
        """Compute nothing."""
        Stations.note("the worker has it")
        return Known(self.result_of(batch, 1e-5))

    @staticmethod
    def result_of(batch: PrefillBatch, seconds: float) -> PrefillResult:
        """Return what a batch that took so long gives."""
        return PrefillResult(
            batch_id=batch.batch_id,
            worker="prefill-0",
            outcomes=tuple(
                PrefillOutcome(request_id=item.request.request_id, token_id=1, finish_reason="length")
                for item in batch.items
            ),
            num_tokens=sum(item.request.num_prefill_tokens for item in batch.items),
            padding_tokens=0,
            replays={},
            seconds=seconds,
        )


class TimedPrefillWorker(PrefillWorker, Timed):
    """The real one, without its engine."""

    def _load_and_open(self, pools: tuple[PoolHandle, ...]) -> PrefillWorkerInfo:
        _watch_process()
        self._engine = NoEngine()  # type: ignore[assignment]
        self._sender = EventSender("prefill-0", self._wire)
        self._figures = WorkerFigures("prefill", "prefill-0", model="stub")
        return PrefillWorkerInfo(
            name="prefill-0",
            model=MODEL,
            buckets=(),
            graph_bytes=0,
            uses_cuda_graphs=False,
            bucket_seconds={},
            device="stub",
            load_seconds=0.0,
            warmup_seconds=0.0,
        )


class NoDecode:
    """A decode worker that is never given anything: all requests end with their first token."""

    def __init__(self, _: str) -> None:
        self._end: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run(self, _: int) -> None:
        """Wait for ever."""
        self._end.get()


class Echo:
    """Answers what it is asked."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def begin(self) -> None:
        """Listen."""
        self._server = serve_actor(self._name, AsyncioReactor(), {"say": lambda message: message})

    async def say(self, message: Any) -> Any:
        """Return it."""
        return message


class Asker:
    """Asks an `Echo`, one question after the other."""

    def __init__(self, other: str) -> None:
        self._other = other

    async def ask(self, count: int) -> dict[str, float]:
        """Return the median seconds of an answer by each way."""
        wire = Wire(AsyncioReactor())
        peers = {"ray": RayPeer(wire.handle(self._other)), "wire": wire.peer(self._other)}
        message = tuple(
            (
                Request(
                    request_id=f"cmpl-{i:032x}-0",
                    api_server="api-0",
                    prompt_token_ids=tuple(range(64)),
                    sampling=SamplingParams(max_tokens=1),
                ),
            )
            for i in range(BURST)
        )
        seconds: dict[str, list[float]] = defaultdict(list)
        for i in range(count * len(_WAYS)):
            way = _WAYS[i // 20 % 2]
            started = time.perf_counter()
            await peers[way].call("say", message)
            seconds[way].append(time.perf_counter() - started)
        return {way: statistics.median(times) for way, times in seconds.items()}


async def _bursts(url: str, count: int) -> list[tuple[float, list[float]]]:
    """Send bursts, one when the last is answered; return when each was sent, and the seconds to each first token."""
    client, bursts = StreamClient(url, "/v1/completions"), []
    for number in range(count):
        bodies = [
            json.dumps({"model": "stub", "prompt": [1 + number % 900] * 16, "max_tokens": 1, "stream": True})
            for _ in range(BURST)
        ]
        started = time.perf_counter()
        answers = await asyncio.gather(*(client.ask(body.encode()) for body in bodies))
        bursts.append((started, [answer.ttft for answer in answers]))
        await asyncio.sleep(0.01)
    client.close()
    return bursts


def worker_config(**more: Any) -> Any:
    """Return what the worker is told."""
    return SimpleNamespace(name="prefill-0", model_name="stub", decode_share=0.0, **more)


def decode_info() -> DecodeWorkerInfo:
    """Return what `NoDecode` would say of itself."""
    pool = PoolHandle(
        decode_worker="decode-0",
        transport="stub",
        address="",
        incarnation=1,
        num_pages=1000,
        page_size=64,
        size_bytes=0,
    )
    return DecodeWorkerInfo(
        name="decode-0",
        model=MODEL,
        pool=pool,
        max_num_seqs=64,
        device="stub",
        load_seconds=0.0,
        weights_bytes=0,
    )


def _start(folder: str) -> tuple[str, list[Any]]:
    """Start the actors; return the URL, and those that note stations."""
    prefill = create_actor(TimedPrefillWorker, "prefill-0", worker_config(), groups={"handoff": 8, "life": 1})
    _keep.append(create_actor(NoDecode, "decode-0", "decode-0", max_concurrency=4))
    info = decode_info()
    scheduler = create_actor(
        TimedScheduler,
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
    config = ApiServerConfig(
        name="api-0",
        host="127.0.0.1",
        port=0,
        model_folder=folder,
        model=MODEL,
        max_queued_requests=LIMITS.max_requests,
        max_queued_tokens=LIMITS.max_tokens,
        settings=AppSettings(model_names=("stub",)),
    )
    api_server = create_actor(TimedApiServer, "api-0", config)
    return ray.get(api_server.start.remote()), [api_server, scheduler, prefill]


_keep: list[Any] = []
"""Handles of actors that nobody else keeps: without one Ray ends them."""


def measure(num_bursts: int) -> dict[str, dict[str, float]]:
    """Return the median milliseconds after a burst was sent at which each station was reached, by way."""
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = {f"w{i}": i for i in range(MODEL.vocab_size)}
        Tokenizer(WordLevel(vocabulary, unk_token="w0")).save(f"{folder}/tokenizer.json")
        url, actors = _start(folder)
        asyncio.run(_bursts(url, 20))
        times: dict[str, dict[str, list[float]]] = {way: defaultdict(list) for way in _WAYS}
        for block in range(_BLOCKS * len(_WAYS)):
            way = _WAYS[block % 2]
            ray.get([actor.take_noted.remote(way) for actor in actors])
            bursts = asyncio.run(_bursts(url, num_bursts // _BLOCKS))
            taken = ray.get([actor.take_noted.remote(way) for actor in actors])
            noted = [station for of_actor in taken for station in of_actor]
            ends = [started for started, _ in bursts[1:]] + [float("inf")]
            for (started, first_tokens), end in zip(bursts, ends, strict=True):
                last = {station: at for station, at in noted if started <= at < end}
                for station, at in last.items():
                    times[way][station].append((at - started) * 1e3)
                times[way]["first client has a token"].append(min(first_tokens) * 1e3)
                times[way]["last client has a token"].append(max(first_tokens) * 1e3)
        return {
            way: {station: statistics.median(values) for station, values in of_way.items()}
            for way, of_way in times.items()
        }


def _print(title: str, rows: Sequence[tuple[str, float, float]]) -> None:
    print(f"{title:<32}{'ray':>8}{'wire':>8}   ratio")
    for name, by_ray, by_wire in rows:
        print(f"{name:<32}{by_ray:>8.2f}{by_wire:>8.2f}   {by_wire / by_ray:.2f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--bursts", type=int, default=100, help="by each way")
    arguments = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(address="local", namespace=RAY_NAMESPACE, include_dashboard=False, log_to_driver=False)
    echo, asker = create_actor(Echo, "echo", "echo"), create_actor(Asker, "asker", "echo")
    ray.get(echo.begin.remote())
    trips = ray.get(asker.ask.remote(5 * arguments.bursts))
    for actor in (echo, asker):
        ray.kill(actor)
    times = measure(arguments.bursts)
    ray.shutdown()
    _print("ms, p50", [("round trip of a submission", trips["ray"] * 1e3, trips["wire"] * 1e3)])
    stations = [*_STATIONS[:-1], "first client has a token", "last client has a token", _STATIONS[-1]]
    _print("burst of 8: ms after it is sent", [(s, times["ray"][s], times["wire"][s]) for s in stations])


if __name__ == "__main__":
    main()
