"""Kills parts of a service at random under steady load, and checks every answer.

The service has two ApiServers and its journal in a Redis of its own. Clients send each request with a key, again
when its connection breaks or it is 503, and compare its tokens with those of an undisturbed run. Prints kills
survived, requests checked, and the seconds from a kill to the next answer to a request that was sent after it:

    python -m benchmarks.chaos --minutes 5
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.support.chaos import RAY_TITLES, Load, ask_undisturbed, send_signal
from tests.support.redis_server import RedisServer, running_redis
from tests.support.service import Service, serve

NUM_CLIENTS = 6
HANG_S = 10
"""After so long without progress a process is started again."""


async def _strike(service: Service, redis_server: RedisServer, chooser: random.Random) -> str:
    """End, or stop, one part; return what was done."""
    part = chooser.choice([*RAY_TITLES, "redis"])
    if part == "redis":
        await asyncio.to_thread(redis_server.stop, signal.SIGKILL)
        await asyncio.to_thread(redis_server.start)
        return "SIGKILL redis"
    number = signal.SIGSTOP if chooser.random() < 0.2 else signal.SIGKILL
    await asyncio.to_thread(send_signal, service, part, number)
    return f"{number.name} {part}"


async def _run(service: Service, redis_server: RedisServer, seconds: float, seed: int) -> int:
    chooser = random.Random(seed)
    prompts = [[chooser.randrange(3, 49152) for _ in range(chooser.randint(2, 60))] for _ in range(16)]
    load = Load(service, await ask_undisturbed(service, prompts, 24))
    running = asyncio.create_task(load.run(NUM_CLIENTS))
    pauses: dict[str, list[float]] = {}
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at and not load.wrong:
        # Deaths in a row would make suspects of those that were there each time.
        await load.wait_for(chooser.randint(2, 4) * NUM_CLIENTS)
        started = time.monotonic()
        what = await _strike(service, redis_server, chooser)
        # Each client may have had an answer on its way.
        await load.wait_for(NUM_CLIENTS + 1)
        pauses.setdefault(what, []).append(time.monotonic() - started)
        print(f"{what}: {pauses[what][-1]:.1f} s", flush=True)
    load.is_over = True
    await running
    every = [pause for found in pauses.values() for pause in found]
    print(
        f"\n{len(every)} kills survived, {load.num_checked} requests checked, {load.num_sent_again} times sent "
        f"again, {len(load.wrong)} wrong"
    )
    for name, found in sorted({**pauses, "all": every}.items()):
        print(
            f"  {name:20} {len(found):4} times, seconds p50 {statistics.median(found):5.1f}, max {max(found):5.1f}"
        )
    for line in load.wrong:
        print(line)
    return 1 if load.wrong else 0


def main() -> int:
    """Run for some minutes; return 1 if an answer was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        running_redis(Path(folder), "--appendonly", "yes") as redis_server,
        serve(
            "--dtype=float32",
            "--kv-memory=256MiB",
            "--max-capture-tokens=64",
            "--api-servers=2",
            f"--journal={redis_server.url}",
            f"--watchdog-timeout-s={HANG_S}",
        ) as service,
    ):
        return asyncio.run(_run(service, redis_server, 60 * options.minutes, options.seed))


if __name__ == "__main__":
    sys.exit(main())
