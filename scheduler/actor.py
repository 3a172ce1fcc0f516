"""The Scheduler actor: carries messages between `SchedulerCore` and the other actors, and owns the clock."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ray.exceptions import RayActorError, RayError

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
from scheduler.actors import Actors, cause
from scheduler.batching.adaptive import AdaptivePolicy
from scheduler.batching.cost_model import CostModel
from scheduler.batching.former import BatchFormer
from scheduler.batching.policies import FixedPolicy
from scheduler.core import QueueLimits, SchedulerCore
from scheduler.crew import Crew
from scheduler.fleet import Fleet, restart
from scheduler.garbage import freeze_what_is_loaded
from scheduler.messages import (
    SCHEDULER_NAME,
    AbortReply,
    DecodeWorkerInfo,
    Figures,
    Heartbeat,
    PrefillResult,
    PrefillWorkerInfo,
    Request,
    SchedulerState,
    ServiceLoad,
    ServiceStatus,
    StepReport,
    SubmitReply,
)
from scheduler.metrics import SchedulerMetrics
from scheduler.observe.logs import LogFormat, log_to_stderr
from scheduler.observe.ray_export import PERIOD_S, RayMirror
from scheduler.observe.workers import OF_WORKERS
from scheduler.readiness import ProgressWatch
from scheduler.request_trace import RequestTrace, TracedMetrics
from scheduler.wire import AsyncioReactor, WireServer, serve_actor
from scheduler.workers import WorkerKind, WorkerTemplate

_LOG = logging.getLogger(__name__)

_STALL_S = 60.0
"""The longest prompts take a prefill worker on the CPU some ten seconds."""


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
    request_log: str | None = None
    """File for a row of each request's time and lengths."""
    log_level: str = "info"
    log_format: LogFormat = "text"
    model: str = ""
    """Name of the model, for the metrics in Ray."""


class Scheduler:
    """The one owner of the queue and of every request's state. Never sees a tensor, never blocks."""

    def __init__(self, config: SchedulerConfig) -> None:
        log_to_stderr(config.log_level, config.log_format)
        self._trace: RequestTrace | None = None
        self._metrics = SchedulerMetrics()
        if config.request_log is not None:
            # Open as long as this process lives.
            file = Path(config.request_log).open("a", encoding="utf-8")  # noqa: SIM115
            self._trace = RequestTrace(file)
            self._metrics = TracedMetrics(self._trace)
        self._mirror = RayMirror({"model": config.model})
        self._is_in_ray = False
        # Above the epochs of a scheduler that died: it made fewer than one lease a nanosecond.
        self._life = time.time_ns()
        self._core = SchedulerCore(
            _make_former(config), config.queue_limits, self._metrics, first_epoch=self._life
        )
        self._actors = Actors()
        self._crew = Crew(
            self._core,
            Fleet(config.worker_template),
            self._actors,
            self._metrics,
            life=self._life,
            watchdog_timeout_s=config.watchdog_timeout_s,
            pump=self._pump,
        )
        self._timer: asyncio.TimerHandle | None = None
        self._progress = ProgressWatch(_STALL_S)
        self._api_lives: dict[str, int] = {}
        freeze_what_is_loaded()
        self._server: WireServer | None = None

    def __repr__(self) -> str:
        return "Scheduler"

    async def start(
        self, decode: tuple[DecodeWorkerInfo, ...], prefill: tuple[PrefillWorkerInfo, ...]
    ) -> None:
        """Take the workers into service; from now on requests are accepted."""
        self._crew.begin(decode, prefill)
        self._listen()

    async def add_worker(self, kind: WorkerKind) -> str:
        """Start a worker and take it into service; return its name. Raises `ConfigError` if it cannot start.

        While a decode worker joins, each prefill worker pauses to open its pool.
        """
        return await self._crew.add(kind)

    async def remove_worker(self, name: str, *, timeout_s: float = 60.0) -> None:
        """Give a worker nothing new, and end it once nothing is left at it.

        Sequences of a decode worker that have not ended after `timeout_s` move to others: their requests wait again,
        with their tokens. Raises `ConfigError` if there is no such worker.
        """
        await self._crew.remove(name, timeout_s)

    async def leave_node(self, node_id: str, *, timeout_s: float = 60.0) -> None:
        """Do the same with all workers of a node that is about to go; nothing starts there any more."""
        await self._crew.leave_node(node_id, timeout_s)

    async def submit(self, groups: tuple[tuple[Request, ...], ...]) -> SubmitReply:
        """Accept each group of requests whole or not at all."""
        await self._crew.until_open()
        return self._submit(groups)

    def _submit(self, groups: tuple[tuple[Request, ...], ...]) -> SubmitReply:
        now = time.monotonic()
        rejections = tuple(self._core.submit(group, now) for group in groups)
        if self._trace is not None:
            for group, rejection in zip(groups, rejections, strict=True):
                self._trace.accepted(() if rejection else group, time.time())
        queue = self._core.queue_state(now)
        self._pump()
        return SubmitReply(rejections=rejections, queue=queue)

    async def resume(self, requests: tuple[Request, ...]) -> None:
        """Take in what an ApiServer still serves, after a scheduler or a worker died: with the tokens that it has."""
        await self._crew.until_open()
        self._core.resume(requests, time.monotonic())
        self._pump()

    async def heartbeat(self, heartbeat: Heartbeat) -> SchedulerState:
        """Take in what an ApiServer did by itself, and show it that the scheduler lives.

        With the first of a new process, what the one of that name before it had asked for is ended.
        """
        self._crew.recover_if_needed()
        self._listen()
        name = heartbeat.api_server
        if self._api_lives.get(name, heartbeat.life) != heartbeat.life:
            num_ended = self._core.cancel_all_of(name, time.monotonic())
            _LOG.warning("%s starts again; %d requests of its former life are ended", name, num_ended)
            self._pump()
        self._api_lives[name] = heartbeat.life
        self._metrics.heartbeat(heartbeat)
        if not self._is_in_ray:
            self._is_in_ray = True
            self._actors.spawn(self._publish_to_ray())
        return SchedulerState(life=self._life, num_deaths=self._crew.num_deaths)

    async def abort(self, completion_id: str, key_digest: str) -> AbortReply:
        """End all sequences of a completion that was asked for with this API key."""
        reply = self._core.abort(completion_id, key_digest, time.monotonic())
        self._pump()
        return reply

    async def reset_prefix_cache(self) -> int:
        """Forget all cached blocks of tokens; return how many they were."""
        return self._core.reset_prefix_cache()

    async def load(self) -> ServiceLoad:
        """Return how much there is to do."""
        return ServiceLoad(
            num_live=self._core.num_live,
            num_waiting=self._core.num_waiting,
            num_waiting_tokens=self._core.num_waiting_tokens,
        )

    async def not_ready(self) -> str | None:
        """Return why no progress is to be expected, or None if it is."""
        dead = await self._crew.dead_workers()
        return f"{', '.join(dead)} died" if dead else self._progress.problem(time.monotonic())

    async def cancel(self, request_ids: tuple[str, ...]) -> None:
        """End requests on their clients' wish. Ids of requests that have ended are passed over."""
        self._cancel(request_ids)

    def _cancel(self, request_ids: tuple[str, ...]) -> None:
        now = time.monotonic()
        for request_id in request_ids:
            self._core.cancel(request_id, now)
        self._pump()

    async def step_done(self, report: StepReport) -> None:
        """A decode worker made a step. It does not wait for the answer, so an error would be seen by nobody."""
        self._step_done(report)

    def _step_done(self, report: StepReport) -> None:
        self._crew.recover_if_needed()
        if report.run_id != self._crew.run_of(report.worker):
            return
        self._heard_of(report.worker)
        try:
            self._core.step_done(report, time.monotonic())
        except Exception:
            _LOG.exception("report %d of %s cannot be taken in", report.number, report.worker)
            raise
        self._pump()

    async def stop(self) -> None:
        """Watch nobody any more: the workers are about to be ended on purpose. Ends them, added ones too."""
        self._actors.cancel_all()
        self._crew.stop()

    async def metrics(self, figures: Figures) -> Figures:
        """Take in what an ApiServer counted of late, and return all figures of the service."""
        self._metrics.add(figures)
        return self._metrics.figures(self._core)

    async def status(self) -> ServiceStatus:
        """Return what the service does, in one look."""
        return ServiceStatus(
            problem=await self.not_ready(), load=await self.load(), actors=self._metrics.actors(self._core)
        )

    def _listen(self) -> None:
        """Take from actors of this host by a shorter way what they send often."""
        if self._server is None:
            self._server = serve_actor(
                SCHEDULER_NAME,
                AsyncioReactor(),
                {
                    "submit": lambda groups: (
                        self._submit(groups) if self._crew.is_open else self.submit(groups)
                    ),
                    "cancel": self._cancel,
                    "step_done": self._step_done,
                },
            )

    async def _publish_to_ray(self) -> None:
        """Show the figures through Ray too, apart from those that the workers show themselves. Never returns."""
        while True:
            await asyncio.sleep(PERIOD_S)
            figures = self._metrics.figures(self._core, without=OF_WORKERS)
            await asyncio.to_thread(self._mirror.publish, figures)

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
                # The batch leaves here and now: whoever else is to be told something comes after it.
                answer = self._actors.call(action.worker, "prefill", action.batch)
                self._actors.spawn(self._prefill(action, answer, self._crew.run_of(action.worker)))
            case SendDecodeStarts(worker=worker, starts=starts):
                self._actors.post(worker, "add", starts)
            case SendDecodeGrow(worker=worker, grants=grants):
                self._actors.post(worker, "grow", grants)
            case SendDecodeCancel(worker=worker, refs=refs):
                self._actors.post(worker, "cancel", refs)
            case SendEvents(api_server=api_server, events=events):
                with suppress(ValueError):  # It is gone for good, and its clients with it.
                    self._actors.post(api_server, "deliver", events)
            case ReleaseWorker(worker=worker):
                self._actors.spawn(self._crew.end(worker))

    async def _prefill(
        self, action: SendPrefill, answer: Awaitable[PrefillResult], run_id: int | None
    ) -> None:
        """Wait for a batch that is computed, and tell the core what became of it."""
        worker = action.worker
        try:
            result = await answer
        except RayActorError:
            _LOG.error("%s died with batch %d", worker, action.batch.batch_id)
            self._crew.lost(worker, run_id)
        except RayError as error:
            # It ends its process for what it knows of; what it cannot even say is no better.
            _LOG.exception("batch %d: %s failed: %s", action.batch.batch_id, worker, cause(error))
            restart(worker)
            self._crew.lost(worker, run_id)
        else:
            if self._crew.run_of(worker) == run_id:
                self._heard_of(worker)
                self._core.prefill_done(result, time.monotonic())
                if result.handoff_pending:
                    self._actors.spawn(self._hand_off(result, run_id))
        self._pump()

    async def _hand_off(self, result: PrefillResult, run_id: int | None) -> None:
        """Wait until the pages of a computed batch have arrived, and tell the core."""
        worker = result.worker
        try:
            handoff = await self._actors.call(worker, "handed_off", result.batch_id)
        except RayActorError as error:
            _LOG.error("%s died with the pages of batch %d: %s", worker, result.batch_id, cause(error))
            self._crew.lost(worker, run_id)
        except RayError as error:
            # It lives, and may compute a batch whose pages are given to others as soon as it counts as lost.
            _LOG.exception("the pages of batch %d: %s failed: %s", result.batch_id, worker, cause(error))
            restart(worker)
            self._crew.lost(worker, run_id)
        else:
            if self._crew.run_of(worker) == run_id:
                self._heard_of(worker)
                self._core.handoff_done(handoff, time.monotonic())
        self._pump()

    def _heard_of(self, worker: str) -> None:
        self._progress.progressed(time.monotonic())
        self._crew.progressed(worker)


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
