"""Workers that join and leave while the service runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from scheduler.errors import ConfigError
from scheduler.messages import RAY_NAMESPACE, DecodeWorkerInfo, PoolHandle, PrefillWorkerInfo
from scheduler.workers import WorkerKind, WorkerTemplate, create_worker

_STOP_TIMEOUT_S = 5.0


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
        self._num_named: dict[WorkerKind, int] = {"prefill": 0, "decode": 0}

    def __iter__(self) -> Iterator[str]:
        return iter([*self.prefill_workers, *self.pools])

    def __contains__(self, name: str) -> bool:
        return name in self.pools or name in self.prefill_workers

    def begin(self, decode: Sequence[DecodeWorkerInfo], prefill: Sequence[PrefillWorkerInfo]) -> None:
        """Take in the workers with which the service starts."""
        self.pools = {info.name: info.pool for info in decode}
        self.prefill_workers = [info.name for info in prefill]
        self._num_named = {"prefill": len(prefill), "decode": len(decode)}

    def forget(self, name: str) -> None:
        """A worker is gone."""
        self._added.pop(name, None)
        if self.pools.pop(name, None) is not None:
            for prefill_worker in self.prefill_workers:
                _actor(prefill_worker).detach.remote(name)
        elif name in self.prefill_workers:
            self.prefill_workers.remove(name)

    async def start_decode_worker(self) -> DecodeWorkerInfo:
        """Start a decode worker and let all prefill workers open its pool. Raises `ConfigError` with the reason."""
        name, actor = self._create("decode")
        try:
            info: DecodeWorkerInfo = await actor.load.remote()
            await asyncio.gather(*(_actor(other).attach.remote(info.pool) for other in self.prefill_workers))
        except BaseException:
            ray.kill(self._added.pop(name))
            raise
        self.pools[name] = info.pool
        return info

    async def start_prefill_worker(self) -> PrefillWorkerInfo:
        """Start a prefill worker that knows all pools. Raises `ConfigError` with the reason."""
        name, actor = self._create("prefill")
        try:
            info: PrefillWorkerInfo = await actor.load.remote(tuple(self.pools.values()))
        except BaseException:
            ray.kill(self._added.pop(name))
            raise
        self.prefill_workers.append(name)
        return info

    async def end_worker(self, name: str) -> None:
        """End a worker at which nothing is left."""
        actor = _actor(name)
        if name in self.pools:
            with suppress(RayError, TimeoutError):
                await asyncio.wait_for(actor.stop.remote(), _STOP_TIMEOUT_S)
        self.forget(name)
        ray.kill(actor)

    def stop_added(self) -> None:
        """End those that were added."""
        for actor in self._added.values():
            ray.kill(actor)
        self._added.clear()

    def _create(self, kind: WorkerKind) -> tuple[str, Any]:
        if self._template is None:
            raise ConfigError("worker_template must be set for workers to be added")
        # A name that was in use may still be taken: an actor's end takes a moment.
        name = f"{kind}-{self._num_named[kind]}"
        self._num_named[kind] += 1
        self._added[name] = create_worker(kind, name, self._template)
        return name, self._added[name]


def _actor(name: str) -> Any:
    return ray.get_actor(name, namespace=RAY_NAMESPACE)
