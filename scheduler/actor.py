"""The Scheduler actor: carries messages between `SchedulerCore` and the other actors, and owns the clock."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayError

from graphs.buckets import default_token_ladder
from scheduler.actions import (
    Action,
    ReleaseWorker,
    SendDecodeCancel,
    SendDecodeGrow,
    SendDecodeStarts,
    SendEvents,
    SendPrefill,
)
from scheduler.batching.adaptive import AdaptivePolicy
from scheduler.batching.cost_model import CostModel
from scheduler.batching.former import BatchFormer
from scheduler.batching.policies import FixedPolicy
from scheduler.core import QueueLimits, SchedulerCore
from scheduler.errors import ConfigError, OverloadedError
from scheduler.fleet import Fleet, end, kind_of, restart, running_workers
from scheduler.messages import (
    RAY_NAMESPACE,
    AbortReply,
    DecodeWorkerInfo,
    Heartbeat,
    PrefillResult,
    PrefillWorkerInfo,
    Request,
    SchedulerState,
    ServiceLoad,
    StepReport,
    SubmitReply,
)
from scheduler.metrics import SchedulerMetrics
from scheduler.readiness import ProgressWatch
from scheduler.watchdog import Watchdog
from scheduler.workers import WorkerKind, WorkerTemplate

_LOG = logging.getLogger(__name__)

_STALL_S = 60.0
"""The longest prompts take a prefill worker on the CPU some ten seconds."""
_PING_TIMEOUT_S = 0.5
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0
"""Between attempts to have a worker back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What the Scheduler actor is started with."""

    batch_policy: Literal["fixed", "adaptive"]
    max_batch_requests: int
    batch_timeout_s: float
    max_batch_tokens: int | None
    queue_limits: QueueLimits
    worker_template: WorkerTemplate | None = None
    """What workers that are added later are started with; None: none can be added."""
    watchdog_timeout_s: float = 300.0
    """How long a worker that has work may finish none of it before it is started again."""
    log_level: str = "info"


class Scheduler:
    """The one owner of the queue and of every request's state. Never sees a tensor, never blocks."""

    def __init__(self, config: SchedulerConfig) -> None:
        logging.basicConfig(stream=sys.stderr, level=config.log_level.upper(), format="%(message)s")
        self._metrics = SchedulerMetrics()
        # Above the epochs of a scheduler that died: it made fewer than one lease a nanosecond.
        self._life = time.time_ns()
        self._core = SchedulerCore(
            _make_former(config), config.queue_limits, self._metrics, first_epoch=self._life
        )
        self._handles: dict[str, Any] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._fleet = Fleet(config.worker_template)
        self._leaving: dict[str, asyncio.Future[None]] = {}
        self._progress = ProgressWatch(_STALL_S)
        self._away: set[str] = set()
        self._num_deaths = 0
        self._api_lives: dict[str, int] = {}
        self._runs: dict[str, int] = {}
        self._num_runs = 0
        self._watchdog = Watchdog(config.watchdog_timeout_s)
        self._watchdog_s = config.watchdog_timeout_s
        self._opened = asyncio.Event()
        self._is_stopping = False
        self._must_recover = True  # unless this is the first scheduler, which is told to start
        self._pings: dict[str, asyncio.Task[bool]] = {}

    def __repr__(self) -> str:
        return "Scheduler"

    async def start(
        self, decode: tuple[DecodeWorkerInfo, ...], prefill: tuple[PrefillWorkerInfo, ...]
    ) -> None:
        """Take the workers into service; from now on requests are accepted."""
        self._must_recover = False
        self._fleet.begin(decode, prefill)
        for decode_info in decode:
            self._take_decode_worker(decode_info)
        for prefill_info in prefill:
            self._take_prefill_worker(prefill_info)
        self._open()

    async def add_worker(self, kind: WorkerKind) -> str:
        """Start a worker and take it into service; return its name. Raises `ConfigError` if it cannot start.

        While a decode worker joins, each prefill worker pauses to open its pool.
        """
        info = await self._fleet.start_worker(kind, self._core.fence_epoch())
        self._take(info)
        return info.name

    async def remove_worker(self, name: str, *, timeout_s: float = 60.0) -> None:
        """Give a worker nothing new, and end it once nothing is left at it.

        Sequences of a decode worker that have not ended after `timeout_s` move to others: their requests wait again,
        with their tokens. Raises `ConfigError` if there is no such worker.
        """
        if name not in self._fleet:
            raise ConfigError(f"worker must be one of {', '.join(self._fleet)}, got {name}")
        left = self._leaving.setdefault(name, asyncio.get_running_loop().create_future())
        self._core.drain_worker(name)
        self._pump()
        await asyncio.wait((left,), timeout=timeout_s)
        if not left.done():
            self._core.evict_sequences(name)
            self._pump()
        await left

    async def submit(self, groups: tuple[tuple[Request, ...], ...]) -> SubmitReply:
        """Accept each group of requests whole or not at all."""
        await self._until_open()
        now = time.monotonic()
        rejections = tuple(self._core.submit(group, now) for group in groups)
        queue = self._core.queue_state(now)
        self._pump()
        return SubmitReply(rejections=rejections, queue=queue)

    async def resume(self, requests: tuple[Request, ...]) -> None:
        """Take in what an ApiServer still serves, after a scheduler or a worker died: with the tokens that it has."""
        await self._until_open()
        self._core.resume(requests, time.monotonic())
        self._pump()

    async def heartbeat(self, heartbeat: Heartbeat) -> SchedulerState:
        """Take in what an ApiServer did by itself, and show it that the scheduler lives.

        With the first of a new process, what the one of that name before it had asked for is ended.
        """
        self._recover_if_needed()
        name = heartbeat.api_server
        if self._api_lives.get(name, heartbeat.life) != heartbeat.life:
            num_ended = self._core.cancel_all_of(name, time.monotonic())
            _LOG.warning("%s starts again; %d requests of its former life are ended", name, num_ended)
            self._pump()
        self._api_lives[name] = heartbeat.life
        self._metrics.rejected(OverloadedError.label, heartbeat.num_overloaded)
        if heartbeat.journal is not None:
            self._metrics.journal_status(heartbeat.api_server, heartbeat.journal)
        return SchedulerState(life=self._life, num_deaths=self._num_deaths)

    async def abort(self, completion_id: str, key_digest: str) -> AbortReply:
        """End all sequences of a completion that was asked for with this API key."""
        reply = self._core.abort(completion_id, key_digest, time.monotonic())
        self._pump()
        return reply

    async def load(self) -> ServiceLoad:
        """Return how much there is to do."""
        return ServiceLoad(
            num_live=self._core.num_live,
            num_waiting=self._core.num_waiting,
            num_waiting_tokens=self._core.num_waiting_tokens,
        )

    async def not_ready(self) -> str | None:
        """Return why no progress is to be expected, or None if it is."""
        dead = await self._dead_workers()
        return f"{', '.join(dead)} died" if dead else self._progress.problem(time.monotonic())

    async def cancel(self, request_ids: tuple[str, ...]) -> None:
        """End requests on their clients' wish. Ids of requests that have ended are passed over."""
        now = time.monotonic()
        for request_id in request_ids:
            self._core.cancel(request_id, now)
        self._pump()

    async def step_done(self, report: StepReport) -> None:
        """A decode worker made a step. It does not wait for the answer, so an error would be seen by nobody."""
        self._recover_if_needed()
        if report.run_id != self._runs.get(report.worker):
            return
        self._progress.progressed(time.monotonic())
        self._watchdog.progressed(report.worker, time.monotonic())
        try:
            self._core.step_done(report, time.monotonic())
        except Exception:
            _LOG.exception("report %d of %s cannot be taken in", report.number, report.worker)
            raise
        self._pump()

    async def stop(self) -> None:
        """Watch nobody any more: the workers are about to be ended on purpose. Ends them, added ones too."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        self._fleet.stop_all()

    async def metrics(self) -> str:
        """Return all metrics in Prometheus' text format."""
        return self._metrics.render(self._core)

    def _pump(self) -> None:
        """Carry out what the core wants, and call again when it next wants something."""
        now = time.monotonic()
        for action in self._core.tick(now):
            self._perform(action)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._progress.update(self._core.num_live, now)
        wake_at = self._core.wake_at()
        if wake_at is not None and wake_at > now:
            self._timer = asyncio.get_running_loop().call_later(wake_at - now, self._pump)

    def _perform(self, action: Action) -> None:
        match action:
            case SendPrefill():
                self._spawn(self._prefill(action))
            case SendDecodeStarts(worker=worker, starts=starts):
                self._handle(worker).add.remote(starts)
            case SendDecodeGrow(worker=worker, grants=grants):
                self._handle(worker).grow.remote(grants)
            case SendDecodeCancel(worker=worker, refs=refs):
                self._handle(worker).cancel.remote(refs)
            case SendEvents(api_server=api_server, events=events):
                self._handle(api_server).deliver.remote(events)
            case ReleaseWorker(worker=worker):
                self._spawn(self._end_worker(worker))

    async def _prefill(self, action: SendPrefill) -> None:
        """Have a batch computed, and tell the core what became of it."""
        worker, run_id = action.worker, self._runs.get(action.worker)
        try:
            result = await self._handle(worker).prefill.remote(action.batch)
        except RayActorError:
            _LOG.error("%s died with batch %d", worker, action.batch.batch_id)
            self._worker_lost(worker, run_id)
        except RayError as error:
            # It ends its process for what it knows of; what it cannot even say is no better.
            _LOG.exception("batch %d: %s failed: %s", action.batch.batch_id, worker, _cause(error))
            restart(worker)
            self._worker_lost(worker, run_id)
        else:
            if self._runs.get(worker) == run_id:
                self._heard_of(worker)
                self._core.prefill_done(result, time.monotonic())
                if result.handoff_pending:
                    self._spawn(self._hand_off(result, run_id))
        self._pump()

    async def _hand_off(self, result: PrefillResult, run_id: int | None) -> None:
        """Wait until the pages of a computed batch have arrived, and tell the core."""
        worker = result.worker
        try:
            handoff = await self._handle(worker).handed_off.remote(result.batch_id)
        except RayError as error:
            _LOG.error("%s died with the pages of batch %d: %s", worker, result.batch_id, _cause(error))
            self._worker_lost(worker, run_id)
        else:
            if self._runs.get(worker) == run_id:
                self._heard_of(worker)
                self._core.handoff_done(handoff, time.monotonic())
        self._pump()

    def _heard_of(self, worker: str) -> None:
        now = time.monotonic()
        self._progress.progressed(now)
        self._watchdog.progressed(worker, now)

    def _take(self, info: DecodeWorkerInfo | PrefillWorkerInfo) -> None:
        """Take a worker into service that is ready."""
        if isinstance(info, DecodeWorkerInfo):
            self._take_decode_worker(info)
            self._open()
        else:
            self._take_prefill_worker(info)
        self._away.discard(info.name)
        _LOG.info("%s joins", info.name)
        self._pump()

    def _take_decode_worker(self, info: DecodeWorkerInfo) -> None:
        self._core.add_decode_worker(info)
        self._spawn(self._watch_decode(info.name, self._new_run(info.name)))

    def _take_prefill_worker(self, info: PrefillWorkerInfo) -> None:
        self._core.add_prefill_worker(info)
        self._new_run(info.name)

    def _new_run(self, worker: str) -> int:
        """Return what tells a worker's time in service from the times before and after it."""
        self._num_runs += 1
        self._runs[worker] = self._life + self._num_runs
        return self._runs[worker]

    async def _end_worker(self, name: str) -> None:
        """End a worker at which nothing is left, and tell who waits for that."""
        async with self._fleet.lock:
            await self._fleet.end_worker(name)
        _LOG.info("%s has left", name)
        self._is_gone(name)

    def _worker_lost(self, name: str, run_id: int | None) -> None:
        """A worker died in a run of its: unless that is known, its requests wait again, and it is brought back."""
        if self._is_stopping or self._runs.get(name) != run_id:
            return
        del self._runs[name]
        self._num_deaths += 1
        self._metrics.worker_died(name)
        is_leaving = name in self._leaving
        self._core.worker_lost(name, time.monotonic(), returns=not is_leaving)
        self._fleet.forget(name, is_for_good=is_leaving)
        self._is_gone(name)
        if is_leaving:
            end(name)
        else:
            self._away.add(name)
            self._spawn(self._bring_back(name))

    async def _bring_back(self, name: str) -> None:
        """Let a worker join that Ray starts again, however often that takes."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                self._take(await self._fleet.join(name, self._core.fence_epoch()))
                return
            except (
                ActorDiedError,
                ValueError,
            ) as error:  # ValueError: Ray knows no actor of that name any more
                _LOG.error("%s is gone for good: %s", name, error)
                self._core.worker_gone(name, time.monotonic())
                self._pump()
                return
            except ActorUnavailableError:
                pass  # It died again, or has not died completely yet.
            except (RayError, ConfigError) as error:
                _LOG.error("%s cannot join: %s", name, error)
                restart(name)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _open(self) -> None:
        """From now on requests are accepted."""
        if not self._opened.is_set():
            self._opened.set()
            self._spawn(self._watch_for_hangs())

    async def _until_open(self) -> None:
        """Wait until it is known what can be accepted."""
        self._recover_if_needed()
        await self._opened.wait()

    def _recover_if_needed(self) -> None:
        if self._must_recover:
            self._must_recover = False
            self._spawn(self._recover())

    async def _recover(self) -> None:
        """Take over the workers of a scheduler that died. What they did for it, ApiServers ask for again."""
        names = await running_workers()
        _LOG.warning("the scheduler starts again and takes over %s", ", ".join(names))
        self._fleet.count_names(names)
        self._away.update(names)
        prefill = [name for name in names if kind_of(name) == "prefill"]
        for name in prefill:
            self._core.expect_prefill_worker(name)
        # A batch that is still computed must not write into pages that are given to others: it is waited for.
        idle = [asyncio.ensure_future(self._lives(name)) for name in prefill]
        if idle:
            await asyncio.wait(idle, timeout=self._watchdog_s)
        for name, answer in zip(prefill, idle, strict=True):
            if not answer.done():
                _LOG.error("%s does not answer and is started again", name)
                restart(name)
        for name in names:
            self._spawn(self._bring_back(name))
        if len(prefill) == len(names):
            self._open()  # There is no pool, and none to wait for: what comes is refused.

    async def _watch_for_hangs(self) -> None:
        """End workers that have work and finish none, so that their requests are computed elsewhere."""
        while True:
            await asyncio.sleep(self._watchdog_s / 8)
            for name, problem in self._watchdog.overdue(self._core.working, time.monotonic()).items():
                _LOG.error("%s hangs and is started again: %s", name, problem)
                restart(name)

    def _is_gone(self, name: str) -> None:
        self._handles.pop(name, None)
        left = self._leaving.pop(name, None)
        if left is not None and not left.done():
            left.set_result(None)

    async def _watch_decode(self, worker: str, run_id: int) -> None:
        """Run a decode worker's loop for as long as it lives."""
        try:
            await self._handle(worker).run.remote(run_id)
        except RayError as error:
            _LOG.error("%s stopped: %s", worker, _cause(error))
            if not isinstance(error, RayActorError):
                restart(worker)
            self._worker_lost(worker, run_id)
            self._pump()

    async def _dead_workers(self) -> list[str]:
        """Ask every worker for a sign of life; return those that are known to be dead.

        A busy one answers late. It gets no second question before it has answered the first.
        """
        self._pings = {name: ping for name, ping in self._pings.items() if name in self._fleet}
        for name in self._fleet:
            if name not in self._pings or self._pings[name].done():
                self._pings[name] = asyncio.create_task(self._lives(name))
        if self._pings:
            await asyncio.wait(self._pings.values(), timeout=_PING_TIMEOUT_S)
        silent = {name for name, ping in self._pings.items() if ping.done() and not ping.result()}
        return sorted(self._away | silent)

    async def _lives(self, name: str) -> bool:
        try:
            await self._handle(name).__ray_ready__.remote()
        except (RayActorError, ValueError):  # ValueError: Ray knows no actor of that name any more
            return False
        return True

    def _handle(self, name: str) -> Any:
        if name not in self._handles:
            self._handles[name] = ray.get_actor(name, namespace=RAY_NAMESPACE)
        return self._handles[name]

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        # asyncio itself keeps no reference to a running task.
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _make_former(config: SchedulerConfig) -> BatchFormer:
    # Until a worker has measured its buckets, all tokens count the same.
    cost_model = CostModel.proportional(default_token_ladder(512))
    policy_class = FixedPolicy if config.batch_policy == "fixed" else AdaptivePolicy
    policy = policy_class(
        max_requests=config.max_batch_requests,
        timeout_s=config.batch_timeout_s,
        max_tokens=config.max_batch_tokens,
        cost_model=cost_model,
    )
    return BatchFormer(policy, cost_model)


def _cause(error: RayError) -> str:
    """Return the last line of an error from another process: its own message, without the traceback."""
    return str(error).strip().splitlines()[-1]
