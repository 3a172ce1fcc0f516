"""Workers that join and leave while the service runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from scheduler.errors import ConfigError
from scheduler.messages import RAY_NAMESPACE, DecodeWorkerInfo, PoolHandle, PrefillWorkerInfo
from scheduler.workers import WorkerKind, WorkerTemplate, create_worker

_STOP_TIMEOUT_S = 5.0
_ATTACH_TIMEOUT_S = 300.0
"""A prefill worker captures its graphs for the pool within that time, after the batch that it computes."""


class Fleet:
    """Owns the workers that were added, and knows all others by name."""

    def __init__(self, template: WorkerTemplate | None) -> None:
        self._template = template
        self._added: dict[str, Any] = {}
        self.lock = asyncio.Lock()
        """One worker joins or leaves at a time: a prefill worker must know all pools."""
        self.pools: dict[str, PoolHandle] = {}
        """Of each decode worker, by name."""
        self.prefill_workers: list[str] = []
        """Their names."""
        self.node_ids: dict[str, str] = {}
        """Of each worker's host, by the worker's name."""
        self._num_named: dict[WorkerKind, int] = {"prefill": 0, "decode": 0}

    def __iter__(self) -> Iterator[str]:
        return iter([*self.prefill_workers, *self.pools])

    def __contains__(self, name: str) -> bool:
        return name in self.pools or name in self.prefill_workers

    def begin(self, decode: Sequence[DecodeWorkerInfo], prefill: Sequence[PrefillWorkerInfo]) -> None:
        """Take in the workers with which the service starts."""
        self.pools = {info.name: info.pool for info in decode}
        self.prefill_workers = [info.name for info in prefill]
        self.node_ids = {info.name: info.pool.node_id for info in decode}
        self.node_ids |= {info.name: info.node_id for info in prefill}
        self.count_names([*self])

    def count_names(self, names: Sequence[str]) -> None:
        """Give no worker a name that another has."""
        for name in names:
            kind, number = kind_of(name), int(name.rpartition("-")[2])
            self._num_named[kind] = max(self._num_named[kind], number + 1)

    def forget(self, name: str, *, is_for_good: bool = True) -> None:
        """A worker is gone, perhaps to come back."""
        self.node_ids.pop(name, None)
        if is_for_good:
            self._added.pop(name, None)
        if self.pools.pop(name, None) is not None:
            for prefill_worker in self.prefill_workers:
                with suppress(ValueError):  # Ray knows it no more
                    _actor(prefill_worker).detach.remote(name)
        elif name in self.prefill_workers:
            self.prefill_workers.remove(name)

    @property
    def resources(self) -> Mapping[WorkerKind, Mapping[str, float]]:
        """What each worker of a kind takes up of a node, if that says where it runs."""
        return {} if self._template is None else self._template.resources

    async def start_worker(self, kind: WorkerKind, fence_epoch: int) -> DecodeWorkerInfo | PrefillWorkerInfo:
        """Start a worker and let it join. Raises `ConfigError` with the reason."""
        name = self._create(kind)
        try:
            return await self.join(name, fence_epoch)
        except BaseException:
            ray.kill(self._added.pop(name))
            raise

    async def join(self, name: str, fence_epoch: int) -> DecodeWorkerInfo | PrefillWorkerInfo:
        """Let a worker load, or drop what it did before, and let prefill workers and pools know each other.

        Raises `ConfigError` with the reason, or Ray's error if the worker dies.
        """
        actor = _actor(name)
        if kind_of(name) == "decode":
            info: DecodeWorkerInfo = await actor.load.remote(fence_epoch)
            async with self.lock:
                self.pools[name] = info.pool
                self.node_ids[name] = info.pool.node_id
                await asyncio.gather(*(self._attach(other, info.pool) for other in self.prefill_workers))
            return info
        await actor.load.remote(())  # The long part, without the lock.
        async with self.lock:
            prefill_info: PrefillWorkerInfo = await actor.load.remote(tuple(self.pools.values()))
            self.prefill_workers.append(name)
            self.node_ids[name] = prefill_info.node_id
        return prefill_info

    async def _attach(self, prefill_worker: str, pool: PoolHandle) -> None:
        """Let a prefill worker open a pool. If it cannot answer, it ends: when it is back it opens all of them.

        Raises `ConfigError` if the pool is none that it can open.
        """
        try:
            await asyncio.wait_for(_actor(prefill_worker).attach.remote(pool), _ATTACH_TIMEOUT_S)
        except ConfigError:
            raise
        except (RayActorError, ValueError):
            pass  # It is dead: whoever waits for `live` says so.
        except (RayError, TimeoutError):
            restart(prefill_worker)  # The fault is not the decode worker's.

    async def end_worker(self, name: str) -> None:
        """End a worker at which nothing is left."""
        actor = _actor(name)
        if name in self.pools:
            with suppress(RayError, TimeoutError):
                await asyncio.wait_for(actor.stop.remote(), _STOP_TIMEOUT_S)
        self.forget(name)
        ray.kill(actor)

    def stop_all(self) -> None:
        """End all: those that were added, perhaps by a scheduler that died, have nobody else to end them."""
        for name in {*self, *self._added}:
            end(name)

    def _create(self, kind: WorkerKind) -> str:
        if self._template is None:
            raise ConfigError("worker_template must be set for workers to be added")
        # A name that was in use may still be taken: an actor's end takes a moment.
        name = f"{kind}-{self._num_named[kind]}"
        self._num_named[kind] += 1
        # Its life does not depend on this process: it outlives a death of the scheduler as the others do.
        self._added[name] = create_worker(kind, name, self._template, lifetime="detached")
        return name


def kind_of(name: str) -> WorkerKind:
    """Return the kind of a worker, which its name tells."""
    return "decode" if name.startswith("decode-") else "prefill"


async def running_workers() -> list[str]:
    """Return the names of all workers, also of those that start again just now."""
    names: list[str] = await asyncio.to_thread(ray.util.list_named_actors)
    return sorted(name for name in names if name.startswith(("prefill-", "decode-")))


def end(name: str) -> None:
    """End a worker's process for good."""
    with suppress(ValueError):  # Ray knows it no more
        ray.kill(_actor(name))


def restart(name: str) -> None:
    """End a worker's process, however it hangs; Ray starts it again."""
    with suppress(ValueError):  # Ray knows it no more
        ray.kill(_actor(name), no_restart=False)


def _actor(name: str) -> Any:
    return ray.get_actor(name, namespace=RAY_NAMESPACE)
