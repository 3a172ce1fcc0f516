"""Kills parts of a service at random under steady load, and checks every answer.

Prints kills survived, requests checked, and the seconds from a kill to the next answer to a request that was sent
after it: `python -m benchmarks.chaos --minutes 5`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import time

from tests.support.chaos import RAY_TITLES, Load, ask_undisturbed, pid_of
from tests.support.service import Service, serve

NUM_CLIENTS = 6


async def _run(service: Service, seconds: float, seed: int) -> int:
    chooser = random.Random(seed)
    prompts = [[chooser.randrange(3, 49152) for _ in range(chooser.randint(2, 60))] for _ in range(16)]
    load = Load(service, await ask_undisturbed(service, prompts, 24))
    running = asyncio.create_task(load.run(NUM_CLIENTS))
    pauses: dict[str, list[float]] = {}
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at and not load.wrong:
        # Deaths in a row would make suspects of those that were there each time.
        await load.wait_for(chooser.randint(2, 4) * NUM_CLIENTS)
        part, number = chooser.choice([*RAY_TITLES]), signal.SIGKILL
        if part != "scheduler" and chooser.random() < 0.2:
            number = signal.SIGSTOP
        pid = pid_of(service, part)
        if pid is None:
            continue
        os.kill(pid, number)
        started = time.monotonic()
        # Each client may have had an answer on its way.
        await load.wait_for(NUM_CLIENTS + 1)
        pauses.setdefault(f"{number.name} {part}", []).append(time.monotonic() - started)
        print(f"{number.name} {part}: {pauses[f'{number.name} {part}'][-1]:.1f} s", flush=True)
    load.is_over = True
    await running
    every = [pause for found in pauses.values() for pause in found]
    print(f"\n{len(every)} kills survived, {load.num_checked} requests checked, {len(load.wrong)} wrong")
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
    service_options = ("--dtype=float32", "--kv-memory=256MiB", "--max-capture-tokens=64")
    with serve(*service_options, "--watchdog-timeout-s=10") as service:
        return asyncio.run(_run(service, 60 * options.minutes, options.seed))


if __name__ == "__main__":
    sys.exit(main())
