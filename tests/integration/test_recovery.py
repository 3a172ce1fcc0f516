"""The real Scheduler, its client and the workers' actors, with engines that only count: deaths, and what follows."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from scheduler.actor import Scheduler, SchedulerConfig
from scheduler.admission import Admission
from scheduler.api.scheduler_client import SchedulerClient
from scheduler.core import QueueLimits
from scheduler.messages import (
    RAY_NAMESPACE,
    SCHEDULER_NAME,
    DecodeStart,
    DecodeWorkerInfo,
    Figures,
    Lease,
    ModelInfo,
    PageGrant,
    PoolHandle,
    PrefillBatch,
    PrefillItem,
    PrefillOutcome,
    PrefillResult,
    PrefillWorkerInfo,
    Request,
    SamplingParams,
    SequenceRef,
    TokenEvent,
    TokenEvents,
)
from scheduler.observe.registry import Registry
from scheduler.wire import AsyncioReactor, Wire, serve_actor
from scheduler.workers import create_actor
from worker.decode_actor import DecodeWorker
from worker.events import EventSender
from worker.figures import WorkerFigures
from worker.prefill_actor import PrefillWorker
from worker.prefill_plan import Known

MODEL = ModelInfo(
    name="m", max_model_len=512, vocab_size=300, eos_token_ids=(0,), dtype="float32", num_parameters=1
)
NUM_PAGES = 64
MAX_TOKENS = 60
WATCHDOG_S = 2.0


def token(request: Request, index: int) -> int:
    return 1 + (7 * index + sum(request.prompt_token_ids)) % 251


class CountingDecode:
    """Makes the tokens of its sequences from their places alone."""

    def __init__(self) -> None:
        self.running: dict[SequenceRef, tuple[DecodeStart, int]] = {}
        self.released: list[SequenceRef] = []

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.released)

    def add(self, start: DecodeStart) -> None:
        ref = SequenceRef(request_id=start.request.request_id, epoch=start.lease.epoch)
        self.running[ref] = (start, len(start.request.output_token_ids) + 1)

    def grow(self, grant: PageGrant) -> None: ...

    def cancel(self, ref: SequenceRef) -> None:
        if self.running.pop(ref, None) is not None:
            self.released.append(ref)

    def reset(self) -> None:
        self.running.clear()
        self.released.clear()

    def step(self) -> Any:
        time.sleep(0.01)  # the work of a step
        events = []
        for ref, (start, index) in list(self.running.items()):
            is_last = index + 1 == start.request.sampling.max_tokens
            event = TokenEvent(
                request_id=ref.request_id,
                index=index,
                epoch=ref.epoch,
                token_id=token(start.request, index),
                finish_reason="length" if is_last else None,
            )
            events.append((start.request.api_server, event))
            self.running[ref] = (start, index + 1)
            if is_last:
                del self.running[ref]
                self.released.append(ref)
        released, self.released = self.released, []
        return SimpleNamespace(
            events=events, released=released, seconds=0.01, num_stalled=0, bucket="8", eager_reason=None
        )


class CountingDecodeWorker(DecodeWorker):
    def _load(self) -> DecodeWorkerInfo:
        self._engine = CountingDecode()  # type: ignore[assignment]
        self._pool = SimpleNamespace(fence=lambda epoch: None)  # type: ignore[assignment]
        self._sender = EventSender("decode-0", self._wire)
        self._figures = WorkerFigures("decode", "decode-0", model="m")
        pool = PoolHandle(
            decode_worker="decode-0",
            transport="shm",
            address="",
            incarnation=os.getpid(),
            num_pages=NUM_PAGES + 1,
            page_size=16,
            size_bytes=0,
        )
        return DecodeWorkerInfo(
            name="decode-0",
            model=MODEL,
            pool=pool,
            max_num_seqs=8,
            device="cpu",
            load_seconds=0.0,
            weights_bytes=0,
        )

    def pid(self) -> int:
        return os.getpid()


class CountingPrefill:
    """Answers with first tokens, after a moment; a prompt that begins with 9 ends the process."""

    buffer_bytes = 0
    uses_graphs = False
    is_decoding = False
    model = SimpleNamespace(device=SimpleNamespace(type="cpu"))

    def __init__(self) -> None:
        self.pools: dict[str, PoolHandle] = {}

    @property
    def transports(self) -> dict[str, str]:
        return dict.fromkeys(self.pools, "shm")

    def has_open(self, pool: PoolHandle) -> bool:
        return self.pools.get(pool.decode_worker) == pool

    def attach(self, pool: PoolHandle) -> tuple[()]:
        self.pools[pool.decode_worker] = pool
        return ()

    def detach(self, name: str) -> None:
        self.pools.pop(name, None)

    def start(self, batch: PrefillBatch) -> Known:
        time.sleep(0.02)
        requests = [item.request for item in batch.items]
        if any(request.prompt_token_ids[0] == 9 for request in requests):
            raise MemoryError("no room")
        outcomes = tuple(
            PrefillOutcome(
                request_id=request.request_id, token_id=token(request, len(request.output_token_ids))
            )
            for request in requests
        )
        return Known(
            PrefillResult(
                batch_id=batch.batch_id,
                worker="prefill-0",
                outcomes=outcomes,
                num_tokens=1,
                padding_tokens=0,
                replays={},
                seconds=0.02,
            )
        )

    def recover(self, batch: PrefillBatch, error: Exception) -> PrefillResult:
        raise error


class CountingPrefillWorker(PrefillWorker):
    def _load(self) -> PrefillWorkerInfo:
        self._engine = CountingPrefill()  # type: ignore[assignment]
        self._sender = EventSender("prefill-0", self._wire)
        self._figures = WorkerFigures("prefill", "prefill-0", model="m")
        return PrefillWorkerInfo(
            name="prefill-0",
            model=MODEL,
            buckets=(),
            graph_bytes=0,
            uses_cuda_graphs=False,
            bucket_seconds={},
            device="cpu",
            load_seconds=0.0,
            warmup_seconds=0.0,
        )

    def pid(self) -> int:
        return os.getpid()


class WatchedScheduler(Scheduler):
    async def pid(self) -> int:
        return os.getpid()


class Server:
    """An ApiServer without HTTP."""

    client: SchedulerClient

    def __init__(self, name: str) -> None:
        self.name = name
        self.watching: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Talk to the others as an ApiServer does."""
        reactor = AsyncioReactor()
        wire = Wire(reactor)
        self.client = SchedulerClient(
            wire.handle(SCHEDULER_NAME),
            name=self.name,
            model=MODEL,
            admission=Admission(max_requests=256, max_tokens=100_000),
            registry=Registry(),
            short_way=wire.peer(SCHEDULER_NAME),
        )
        self.server = serve_actor(self.name, reactor, {"deliver": self.client.deliver})
        self.watching = asyncio.create_task(self.client.watch())

    async def deliver(self, events: TokenEvents) -> None:
        self.client.deliver(events)

    async def complete(self, request: Request) -> list[int] | str:
        """Return the tokens of a request, or its error."""
        if self.watching is None:
            self.begin()
        tokens: list[int] = []
        try:
            stream = await self.client.submit([request])
            while len(tokens) < request.sampling.max_tokens:
                tokens += [event.token_id or 0 for _, event in await stream.read()]
        except Exception as error:
            return repr(error)
        return tokens


@pytest.fixture(scope="module")
def actors() -> Iterator[dict[str, Any]]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with pytest.MonkeyPatch.context() as patch:
        # Else a process that hangs has five seconds to end by itself.
        patch.setenv("RAY_kill_worker_timeout_milliseconds", "200")
        ray.init(
            address="local",
            namespace=RAY_NAMESPACE,
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=80 * 1024 * 1024,
            logging_level="ERROR",
        )
    decode, prefill = (
        SimpleNamespace(name=name, model_name="m", decode_share=0.0) for name in ("decode-0", "prefill-0")
    )
    decode = create_actor(CountingDecodeWorker, "decode-0", decode, max_restarts=-1, max_concurrency=4)
    prefill = create_actor(
        CountingPrefillWorker, "prefill-0", prefill, max_restarts=-1, groups={"handoff": 2, "life": 1}
    )
    scheduler = create_actor(
        WatchedScheduler,
        SCHEDULER_NAME,
        SchedulerConfig(
            batch_policy="fixed",
            max_batch_requests=4,
            batch_timeout_s=0.005,
            max_batch_tokens=None,
            queue_limits=QueueLimits(max_requests=256, max_tokens=100_000),
            watchdog_timeout_s=WATCHDOG_S,
        ),
        max_restarts=-1,
    )
    info = ray.get(decode.load.remote())
    prefill_info = ray.get(prefill.load.remote((info.pool,)))
    ray.get(scheduler.start.remote((info,), (prefill_info,)))
    server = create_actor(Server, "api-0", "api-0")
    yield {"decode": decode, "prefill": prefill, "scheduler": scheduler, "server": server}
    ray.get(scheduler.stop.remote())
    ray.shutdown()


def requests(prefix: str, count: int, *prompt: int, **sampling: Any) -> list[Request]:
    return [
        Request(
            request_id=f"{prefix}{i}",
            api_server="api-0",
            prompt_token_ids=(*prompt, 10 + i, 2),
            sampling=SamplingParams(max_tokens=MAX_TOKENS, **sampling),
        )
        for i in range(count)
    ]


def expected(request: Request) -> list[int]:
    return [token(request, i) for i in range(MAX_TOKENS)]


def test_deaths_and_hangs_of_any_part_change_no_answer(actors: dict[str, Any]) -> None:
    server = actors["server"]
    for i, signals in enumerate(
        (
            {"prefill": signal.SIGKILL, "decode": signal.SIGKILL},
            {"decode": signal.SIGSTOP},
            {"scheduler": signal.SIGKILL, "decode": signal.SIGSTOP},
        )
    ):
        asked = [*requests(f"{i}-a", 8), *requests(f"{i}-b", 4, num_logprobs=1)]
        answers = [server.complete.remote(request) for request in asked]
        ray.wait(answers, timeout=0.3)  # all are under way, and some further than others
        pids = {name: ray.get(actors[name].pid.remote()) for name in signals}
        for name, number in signals.items():
            os.kill(pids[name], number)
        late = requests(f"{i}-c", 4)
        answers += [server.complete.remote(request) for request in late]
        assert ray.get(answers, timeout=60) == [expected(request) for request in asked + late]
    # A batch of the scheduler that died, which comes late, writes nothing into pages that others have now.
    (request,) = requests("late", 1)
    item = PrefillItem(request=request, lease=Lease(decode_worker="decode-0", epoch=1, page_ids=(1,)))
    late_batch = PrefillBatch(batch_id=1, decode_worker="decode-0", items=(item,))
    (outcome,) = ray.get(actors["prefill"].prefill.remote(late_batch)).outcomes
    assert outcome.error_label == "stale_lease"
    gauges = ray.get(actors["scheduler"].metrics.remote(Figures())).gauges
    assert gauges["purefill_kv_pages"]["decode", "decode-0", "free"] == NUM_PAGES
    assert gauges["purefill_live_requests"][()] == 0


def test_a_request_for_which_memory_is_short_fails_alone(actors: dict[str, Any]) -> None:
    asked = [*requests("good", 3), *requests("bad", 1, 9)]
    *good, bad = ray.get([actors["server"].complete.remote(request) for request in asked], timeout=120)
    assert good == [expected(request) for request in asked[:3]]
    assert "WorkerFailedError" in bad
    assert "in a row" in bad
