"""The workers in service: they join and leave, and those that die or hang are brought back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayError

from scheduler.actors import Actors, cause
from scheduler.cluster import living_nodes, num_places
from scheduler.core import SchedulerCore
from scheduler.errors import ConfigError
from scheduler.fleet import Fleet, end, kind_of, restart, running_workers
from scheduler.messages import DecodeWorkerInfo, PrefillWorkerInfo
from scheduler.metrics import SchedulerMetrics
from scheduler.watchdog import Watchdog
from scheduler.workers import WorkerKind

_LOG = logging.getLogger(__name__)

_PING_TIMEOUT_S = 0.5
_JOIN_TIMEOUT_S = 3600.0
"""The largest models load and capture their graphs within this time."""
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0
"""Between attempts to have a worker back."""
_NODES_PAUSE_S = 2.0
"""Between looks at the cluster's nodes."""


class Crew:
    """Owns which workers are in service, and since when: each time in service is a run with a number of its own.

    Tells the core of each that joins or dies, and then calls `pump`, so that what follows is carried out.
    """

    def __init__(
        self,
        core: SchedulerCore,
        fleet: Fleet,
        actors: Actors,
        metrics: SchedulerMetrics,
        *,
        life: int,
        watchdog_timeout_s: float,
        pump: Callable[[], None],
    ) -> None:
        """`life`: runs count from there, which must be above those of any scheduler before this one."""
        self.num_deaths = 0
        """Of workers, so far."""
        self._core = core
        self._fleet = fleet
        self._actors = actors
        self._metrics = metrics
        self._pump = pump
        self._leaving: dict[str, asyncio.Future[None]] = {}
        self._away: set[str] = set()
        self._runs: dict[str, int] = {}
        self._last_run = self._life = life
        self._watchdog = Watchdog(watchdog_timeout_s)
        self._watchdog_s = watchdog_timeout_s
        self._opened = asyncio.Event()
        self._is_stopping = False
        self._must_recover = True  # unless this is the first scheduler, which is told to begin
        self._pings: dict[str, asyncio.Task[bool]] = {}
        self._leaving_nodes: set[str] = set()
        self._num_joining: dict[WorkerKind, int] = {"prefill": 0, "decode": 0}

    def begin(self, decode: tuple[DecodeWorkerInfo, ...], prefill: tuple[PrefillWorkerInfo, ...]) -> None:
        """Take the first workers into service."""
        self._must_recover = False
        self._fleet.begin(decode, prefill)
        for decode_info in decode:
            self._take_decode_worker(decode_info)
        for prefill_info in prefill:
            self._take_prefill_worker(prefill_info)
        self._open()

    async def add(self, kind: WorkerKind) -> str:
        """Start a worker and take it into service; return its name. Raises `ConfigError` if it cannot start."""
        info = await self._fleet.start_worker(kind, self._core.fence_epoch())
        self._take(info)
        return info.name

    async def remove(self, name: str, timeout_s: float) -> None:
        """Give a worker nothing new, and end it once nothing is left at it; after `timeout_s` the rest moves.

        Raises `ConfigError` if there is no such worker.
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

    async def leave_node(self, node_id: str, timeout_s: float) -> None:
        """Give the workers of a node nothing new, and end each once nothing is left at it. None starts there again.

        What has not ended after `timeout_s` moves to workers of other nodes.
        """
        self._leaving_nodes.add(node_id)
        names = [name for name, its_node in self._fleet.node_ids.items() if its_node == node_id]
        _LOG.info("node %s leaves with %s", node_id, ", ".join(names) or "no worker")
        await asyncio.gather(*(self.remove(name, timeout_s) for name in names))

    async def end(self, name: str) -> None:
        """End a worker at which nothing is left, and tell who waits for that."""
        self._runs.pop(name, None)  # Its end is no death.
        async with self._fleet.lock:
            await self._fleet.end_worker(name)
        _LOG.info("%s has left", name)
        self._is_gone(name)

    def stop(self) -> None:
        """Watch nobody any more, and end all workers."""
        self._is_stopping = True
        self._fleet.stop_all()

    def run_of(self, worker: str) -> int | None:
        """Return the number of a worker's present run, None if it is not in service."""
        return self._runs.get(worker)

    def progressed(self, worker: str) -> None:
        """A worker has finished a batch, a step, or a handoff."""
        self._watchdog.progressed(worker, time.monotonic())

    def lost(self, name: str, run_id: int | None) -> None:
        """A worker died in a run of its: unless that is known, its requests wait again, and it is brought back."""
        if self._is_stopping or run_id is None or self._runs.get(name) != run_id:
            return
        del self._runs[name]
        self.num_deaths += 1
        self._metrics.worker_died(name)
        is_leaving = name in self._leaving
        self._core.worker_lost(name, time.monotonic(), returns=not is_leaving)
        self._fleet.forget(name, is_for_good=is_leaving)
        self._is_gone(name)
        if is_leaving:
            end(name)
        else:
            self._away.add(name)
            self._actors.spawn(self._bring_back(name))
        self._pump()

    def recover_if_needed(self) -> None:
        """Take over the workers of a scheduler that died, if there was one."""
        if self._must_recover:
            self._must_recover = False
            self._actors.spawn(self._recover())

    @property
    def is_open(self) -> bool:
        """Whether it is known what can be accepted."""
        return self._opened.is_set()

    async def until_open(self) -> None:
        """Wait until it is known what can be accepted."""
        self.recover_if_needed()
        await self._opened.wait()

    async def dead_workers(self) -> list[str]:
        """Ask every worker for a sign of life; return those that are known to be dead.

        A busy one answers late. It gets no second question before it has answered the first.
        """
        self._pings = {name: ping for name, ping in self._pings.items() if name in self._fleet}
        for name in self._fleet:
            if name not in self._pings or self._pings[name].done():
                self._pings[name] = asyncio.create_task(self._actors.lives(name))
        if self._pings:
            await asyncio.wait(self._pings.values(), timeout=_PING_TIMEOUT_S)
        silent = {name for name, ping in self._pings.items() if ping.done() and not ping.result()}
        return sorted(self._away | silent)

    # They join.

    def _take(self, info: DecodeWorkerInfo | PrefillWorkerInfo) -> None:
        """Take a worker into service that is ready."""
        if isinstance(info, DecodeWorkerInfo):
            self._take_decode_worker(info)
            self._core.fail_what_fits_nowhere(time.monotonic())
            self._open()
        else:
            self._take_prefill_worker(info)
        self._away.discard(info.name)
        _LOG.info("%s joins", info.name)
        self._pump()

    def _take_decode_worker(self, info: DecodeWorkerInfo) -> None:
        self._core.add_decode_worker(info)
        self._actors.spawn(self._watch_decode(info.name, self._new_run(info.name)))

    def _take_prefill_worker(self, info: PrefillWorkerInfo) -> None:
        self._core.add_prefill_worker(info)
        self._actors.spawn(self._watch_prefill(info.name, self._new_run(info.name)))

    def _new_run(self, worker: str) -> int:
        self._last_run += 1
        self._runs[worker] = self._last_run
        return self._last_run

    def _open(self) -> None:
        """From now on requests are accepted."""
        if not self._opened.is_set():
            self._opened.set()
            self._actors.spawn(self._watch_for_hangs())
            if self._fleet.resources:
                self._actors.spawn(self._follow_nodes())

    async def _follow_nodes(self) -> None:
        """Start a worker for each place that a node brings."""
        while True:
            await asyncio.sleep(_NODES_PAUSE_S)
            nodes = await asyncio.to_thread(living_nodes)
            self._leaving_nodes &= {node.node_id for node in nodes}
            for kind, need in self._fleet.resources.items():
                num_there = sum(
                    kind_of(name) == kind for name in {*self._fleet, *self._away} if name not in self._leaving
                )
                num_places_left = num_places(nodes, need, self._leaving_nodes) - num_there
                for _ in range(num_places_left - self._num_joining[kind]):
                    self._num_joining[kind] += 1
                    self._actors.spawn(self._fill_place(kind))

    async def _fill_place(self, kind: WorkerKind) -> None:
        try:
            await self.add(kind)
        except (RayError, ConfigError) as error:
            _LOG.error("a %s worker cannot join: %s", kind, cause(error))
            await asyncio.sleep(_LONGEST_PAUSE_S)
        finally:
            self._num_joining[kind] -= 1

    # They die.

    async def _watch_decode(self, worker: str, run_id: int) -> None:
        """Run a decode worker's loop for as long as it lives."""
        try:
            await self._actors.handle(worker).run.remote(run_id)
        except RayError as error:
            if not isinstance(error, RayActorError):
                restart(worker)
            self._report(worker, run_id, error)

    async def _watch_prefill(self, worker: str, run_id: int) -> None:
        """Notice the death of a prefill worker, also of one that has nothing to compute."""
        try:
            await self._actors.handle(worker).live.remote()
        except RayError as error:
            self._report(worker, run_id, error)

    def _report(self, worker: str, run_id: int, error: RayError) -> None:
        if self._runs.get(worker) == run_id and not self._is_stopping:
            _LOG.error("%s stopped: %s", worker, cause(error))
        self.lost(worker, run_id)

    async def _watch_for_hangs(self) -> None:
        """End workers that have work and finish none, so that their requests are computed elsewhere."""
        while True:
            await asyncio.sleep(self._watchdog_s / 8)
            for name, problem in self._watchdog.overdue(self._core.working, time.monotonic()).items():
                _LOG.error("%s hangs and is started again: %s", name, problem)
                restart(name)

    def _is_gone(self, name: str) -> None:
        self._actors.forget(name)
        left = self._leaving.pop(name, None)
        if left is not None and not left.done():
            left.set_result(None)

    # They come back.

    async def _bring_back(self, name: str) -> None:
        """Let a worker join that Ray starts again, however often that takes."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                joining = self._fleet.join(name, self._core.fence_epoch())
                self._take(await asyncio.wait_for(joining, _JOIN_TIMEOUT_S))
                return
            except (ActorDiedError, ValueError) as error:
                # ValueError: Ray knows no actor of that name any more.
                _LOG.error("%s is gone for good: %s", name, error)
                self._core.worker_gone(name, time.monotonic())
                self._pump()
                return
            except ActorUnavailableError:
                pass  # It died again, or has not died completely yet.
            except (RayError, ConfigError, TimeoutError) as error:
                _LOG.error("%s cannot join: %s", name, error or f"no answer within {_JOIN_TIMEOUT_S:g} s")
                restart(name)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _found_workers(self) -> list[str]:
        """Return the names of all workers, however often Ray has to be asked: until then nothing is accepted."""
        while True:
            try:
                return await running_workers()
            except Exception:
                _LOG.exception("Ray does not say which workers there are; it is asked again")
            await asyncio.sleep(_FIRST_PAUSE_S)

    async def _recover(self) -> None:
        """Take over the workers of a scheduler that died. What they did for it, ApiServers ask for again."""
        names = await self._found_workers()
        _LOG.warning("the scheduler starts again and takes over %s", ", ".join(names))
        self._fleet.count_names(names)
        self._away.update(names)
        prefill = [name for name in names if kind_of(name) == "prefill"]
        for name in names:
            if name in prefill:
                self._core.expect_prefill_worker(name)
            else:
                self._core.expect_decode_worker(name)
        # A batch that is still computed must not write into pages that are given to others: it is waited for.
        idle = [
            asyncio.ensure_future(
                self._actors.retire(name, self._life) if name in prefill else self._actors.lives(name)
            )
            for name in names
        ]
        if idle:
            await asyncio.wait(idle, timeout=self._watchdog_s)
        for name, answer in zip(names, idle, strict=True):
            if not answer.done():
                _LOG.error("%s does not answer and is started again", name)
                restart(name)
        for name in names:
            self._actors.spawn(self._bring_back(name))
        if len(prefill) == len(names):
            self._open()  # There is no pool, and none to wait for: what comes is refused.
