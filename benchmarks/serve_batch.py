"""The real part of the batching benchmark: our front and `@serve.batch`, one after the other, same loads."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace

from benchmarks import h200
from benchmarks.loads import Load, azure_code, poisson
from benchmarks.virtual import Setting, run

SATURATION = tuple(Setting("fixed", n, 0.02) for n in (1, 8, 16))
UNDER_LOAD = tuple(Setting("fixed", n, ms / 1000) for n in (1, 4, 8, 16) for ms in (5, 20, 50))
DEFAULT = Setting("fixed", 8, 0.02)
ADAPTIVE = Setting("adaptive", 16, 0.05)


def compare(seconds: float, settings: Sequence[Setting] = UNDER_LOAD) -> None:
    """Print both tables. Each measurement takes `seconds`."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    from scheduler.messages import RAY_NAMESPACE

    ray.init(
        address="local",
        num_cpus=2,
        namespace=RAY_NAMESPACE,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=200 * 2**20,
    )
    try:
        _saturate(seconds)
        _under_load(seconds, settings)
    finally:
        ray.shutdown()


def _saturate(seconds: float) -> None:
    from benchmarks.front import Purefill, ServeBatch, closed_loop

    print("\nReal front, stub that takes no time, prompts of 64 tokens; CPU time of client, front and stub")
    print(f"{'':22}{'':14}{'one batch under way':>24}{'256 requests under way':>34}")
    print(f"{'':22}{'':14}{'ms p50':>13}{'p99':>11}{'req/s':>12}{'ms p50':>11}{'CPU us/req':>13}")
    for setting in SATURATION:
        found = []
        for name in ("purefill", "@serve.batch"):
            n, timeout_s = setting.max_requests, setting.timeout_s
            system = (
                Purefill(n, timeout_s, policy="fixed", is_free=True)
                if name == "purefill"
                else ServeBatch(n, timeout_s, is_free=True)
            )
            try:
                few, many = closed_loop(system, n, seconds), closed_loop(system, 256, seconds)
            finally:
                system.close()
            found.append((few, many))
            print(
                f"{setting!s:22}{name:14}{1000 * few.quantile(0.5):13.2f}{1000 * few.quantile(0.99):11.2f}"
                f"{many.requests_per_s:12.0f}{1000 * many.quantile(0.5):11.1f}{many.cpu_us:13.0f}",
                flush=True,
            )
        (few, many), (their_few, their_many) = found
        print(
            f"{'':22}{'ratio':14}{few.quantile(0.5) / their_few.quantile(0.5):13.2f}{'':11}"
            f"{many.requests_per_s / their_many.requests_per_s:12.2f}{'':11}{many.cpu_us / their_many.cpu_us:13.2f}"
        )


def _loads(seconds: float) -> list[Load]:
    loads = [poisson(rate, seconds=seconds, seed=0) for rate in (50, 200, 800)]
    for speed in (1, 8):
        trace = azure_code(speed)
        if trace is not None:
            loads.append(_busiest(trace, seconds))
    return loads


def _busiest(load: Load, seconds: float) -> Load:
    """Return the part of a load of so many seconds in which most requests arrive."""
    times = [time for time, _ in load.arrivals]
    first, most, end = 0, 0, 0
    for i, time in enumerate(times):
        while end < len(times) and times[end] < time + seconds:
            end += 1
        if end - i > most:
            first, most = i, end - i
    start = times[first]
    arrivals = tuple((time - start, size) for time, size in load.arrivals[first : first + most])
    return replace(load, name=f"{load.name}, its busiest {seconds:g} s", arrivals=arrivals)


def _under_load(seconds: float, settings: Sequence[Setting]) -> None:
    from benchmarks.front import Purefill, ServeBatch, open_loop

    for load in _loads(seconds):
        print(f"\nReal front, stub that takes the time of Qwen3-8B on an H200: {load.name}")
        print(f"{'':22}{'virtual':>19}{'purefill':>22}{'@serve.batch':>22}")
        print(f"{'TTFT in ms':22}{'p50':>9}{'p99':>10}{'p50':>12}{'p99':>10}{'p50':>12}{'p99':>10}")
        # A burst of the trace takes far longer to serve than to send: one fixed setting is enough there.
        fixed = settings if load.name.startswith("Poisson") else (DEFAULT,)
        for setting in (*fixed, ADAPTIVE):
            virtual = run(load, setting, h200.qwen3_8b())
            line = f"{setting!s:22}{1000 * virtual.quantile(0.5):9.1f}{1000 * virtual.quantile(0.99):10.1f}"
            n, timeout_s = setting.max_requests, setting.timeout_s
            systems = [lambda n=n, t=timeout_s, p=setting.policy: Purefill(n, t, policy=p, is_free=False)]
            if setting.policy == "fixed":
                systems.append(lambda n=n, t=timeout_s: ServeBatch(n, t, is_free=False))
            for make in systems:
                system = make()
                try:
                    measured = open_loop(system, load.arrivals)
                finally:
                    system.close()
                line += f"{1000 * measured.quantile(0.5):12.1f}{1000 * measured.quantile(0.99):10.1f}"
            print(line, flush=True)
