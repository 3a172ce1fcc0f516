"""Five times as many requests as a real service can serve: what the admitted wait, and what the rest are told.

    python -m benchmarks.overload --seconds 60 --factor 5

Serves SmolLM2-135M on the CPU with a short queue. First some requests, one after the other: what they take is normal.
Then as many at once as there is room for: their rate is the capacity. Then for the given time `factor` times that
many per second, at random moments, each on a connection of its own, never sent again. Then one after the other again,
at once. The memory of all processes is read all the time.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
import psutil

from tests.support.service import Service, serve

_PROMPT_TOKENS = 32
_OUTPUT_TOKENS = 8
_NUM_SEQS = 32
_NUM_ALONE = 10
_SETTLED_S = 10.0
_REFUSED_P99_S = 0.5
_FLAT = 1.15
"""Memory at the end of the overload may be so much of that after its first fifth."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One request, in seconds since it was due."""

    status: int
    first_s: float
    """Until the head of the answer, which a stream sends when it is admitted, and a refusal at once."""
    total_s: float
    has_retry_after: bool


@dataclass(kw_only=True)
class Measured:
    """What one run gave."""

    alone_s: list[float]
    capacity_per_s: float
    offered: list[Answer] = field(default_factory=list)
    later_s: list[float] = field(default_factory=list)
    """What requests took after the overload, one after the other."""
    back_after_s: float = 0.0
    """From the last request of the overload until three in a row took no more than twice what is normal."""
    memory_mib: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Of the processes of each kind together, a value every second of the overload."""


class Load:
    """Sends requests to one service."""

    def __init__(self, service: Service, seed: int) -> None:
        self._service = service
        self._rng = random.Random(seed)
        self._client = httpx.AsyncClient(
            base_url=service.url,
            timeout=120,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def ask(self) -> Answer:
        """Send one request and read its whole answer."""
        body = {
            "model": self._service.model,
            "prompt": [self._rng.randrange(100, 40_000) for _ in range(_PROMPT_TOKENS)],
            "max_tokens": _OUTPUT_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        started = time.perf_counter()
        async with self._client.stream("POST", "/v1/completions", json=body) as answer:
            first_s = time.perf_counter() - started
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and '"error"' in line:
                    raise RuntimeError(f"an admitted request failed: {line}")
        return Answer(
            status=answer.status_code,
            first_s=first_s,
            total_s=time.perf_counter() - started,
            has_retry_after=int(answer.headers.get("retry-after", 0)) >= 1,
        )

    async def one_after_the_other(self, count: int) -> list[float]:
        """Return the seconds of each of some requests."""
        answers = [await self.ask() for _ in range(count)]
        assert all(answer.status == 200 for answer in answers)
        return [answer.total_s for answer in answers]

    async def capacity(self, count: int) -> float:
        """Return how many requests per second are answered with `_NUM_SEQS` at once."""
        numbers = iter(range(count))

        async def some() -> None:
            for _ in numbers:
                assert (await self.ask()).status == 200

        started = time.perf_counter()
        await asyncio.gather(*(some() for _ in range(_NUM_SEQS)))
        return count / (time.perf_counter() - started)

    async def offer(self, rate: float, seconds: float) -> list[Answer]:
        """Send `rate` requests a second at random moments; return their answers when all are there."""
        tasks: list[asyncio.Task[Answer]] = []
        started = now = time.perf_counter()
        while (now := now + self._rng.expovariate(rate)) < started + seconds:
            await asyncio.sleep(max(0.0, now - time.perf_counter()))
            tasks.append(asyncio.create_task(self.ask()))
        return await asyncio.gather(*tasks)


async def measure(service: Service, *, seconds: float, factor: float, seed: int = 0) -> Measured:
    """Run everything on one service."""
    load = Load(service, seed)
    await load.one_after_the_other(3)
    alone = await load.one_after_the_other(_NUM_ALONE)
    await load.capacity(_NUM_SEQS)
    measured = Measured(alone_s=alone, capacity_per_s=await load.capacity(3 * _NUM_SEQS))
    watching = asyncio.create_task(_watch_memory(service, measured.memory_mib))
    measured.offered = await load.offer(factor * measured.capacity_per_s, seconds)
    watching.cancel()
    started = time.perf_counter()
    normal, in_a_row = 2 * max(alone), 0
    while in_a_row < 3 and time.perf_counter() < started + 6 * _SETTLED_S:
        (taken,) = await load.one_after_the_other(1)
        in_a_row = in_a_row + 1 if taken <= normal else 0
    measured.back_after_s = time.perf_counter() - started
    measured.later_s = await load.one_after_the_other(_NUM_ALONE)
    await load.close()
    return measured


async def _watch_memory(service: Service, memory_mib: dict[str, list[int]]) -> None:
    processes = [process for pid in service.processes() for process in [psutil.Process(pid)]]
    kinds = ("ray::ApiServer", "ray::Scheduler", "ray::PrefillWorker", "ray::DecodeWorker")
    by_kind = {kind: [p for p in processes if p.name().startswith(kind[:15])] for kind in kinds}
    while True:
        for kind, members in by_kind.items():
            memory_mib[kind.removeprefix("ray::")].append(sum(p.memory_info().rss for p in members) >> 20)
        await asyncio.sleep(1)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of all do not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def report(measured: Measured, *, max_wait_s: float) -> list[str]:
    """Print what was measured, and return what is not as it must be."""
    admitted = [a for a in measured.offered if a.status == 200]
    refused = [a for a in measured.offered if a.status == 429]
    statuses = Counter(a.status for a in measured.offered)
    waits = [a.first_s for a in admitted]
    refusals = [a.total_s for a in refused]
    rows = {
        "normal: one after the other, p50 and max": f"{quantile(measured.alone_s, 0.5):.3f}, "
        f"{max(measured.alone_s):.3f} s",
        "capacity": f"{measured.capacity_per_s:.1f} requests/s",
        "offered": f"{len(measured.offered)}: "
        + ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items())),
        "admitted: whole answer p50, p99": f"{quantile([a.total_s for a in admitted], 0.5):.2f}, "
        f"{quantile([a.total_s for a in admitted], 0.99):.2f} s (bound {max_wait_s:.1f} s)",
        "admitted: head of the answer p50, p99": f"{quantile(waits, 0.5):.3f}, {quantile(waits, 0.99):.3f} s",
        "refused: p50, p99": f"{1e3 * quantile(refusals, 0.5):.0f}, {1e3 * quantile(refusals, 0.99):.0f} ms",
        "back to normal after": f"{measured.back_after_s:.1f} s",
        "afterwards: one after the other, p50 and max": f"{quantile(measured.later_s, 0.5):.3f}, "
        f"{max(measured.later_s):.3f} s",
    }
    for kind, values in measured.memory_mib.items():
        rows[f"memory of {kind}: first fifth, end"] = f"{values[len(values) // 5]}, {values[-1]} MiB"
    for name, value in rows.items():
        print(f"{name:<48} {value}")
    wrong = {
        "an answer is neither 200 nor 429": set(statuses) > {200, 429},
        "nothing was refused": not refused,
        "a refusal has no Retry-After": not all(a.has_retry_after for a in refused),
        "admitted requests waited longer than the bound": quantile([a.total_s for a in admitted], 0.99)
        > max_wait_s,
        "refusals were slow": quantile(refusals, 0.99) > _REFUSED_P99_S,
        "it took long to be back to normal": measured.back_after_s > _SETTLED_S,
        "memory grew": any(v[-1] > _FLAT * v[len(v) // 5] for v in measured.memory_mib.values()),
    }
    return [name for name, is_so in wrong.items() if is_so]


def main() -> None:
    """Overload a service of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--factor", type=float, default=5.0)
    parser.add_argument("--max-queued-requests", type=int, default=64)
    given = parser.parse_args()
    options = {
        "--max-queued-requests": given.max_queued_requests,
        "--max-num-seqs": _NUM_SEQS,
        "--max-capture-tokens": 256,
        "--kv-memory": "1GiB",
        "--log-level": "warning",
    }
    with serve(*(str(part) for option in options.items() for part in option)) as service:
        measured = asyncio.run(measure(service, seconds=given.seconds, factor=given.factor))
    # Whoever is admitted waits for a whole queue and all that runs, at the rate at which they are served.
    max_wait_s = 2 * (given.max_queued_requests + 2 * _NUM_SEQS) / measured.capacity_per_s
    wrong = report(measured, max_wait_s=max_wait_s)
    for line in wrong:
        print("FAILED", line)
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
