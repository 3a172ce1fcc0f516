"""Holding prompts, and not holding them, on the public traces: TTFT on 1, 8 and 64 prefill workers.

Each trace is played so fast that the prefill workers are about half busy; there are as many decode workers. Prints a
table in Markdown.

    python -m benchmarks.simulate_traces --plot docs/simulate.png
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.loads import SHARED
from scheduler.simulate.collector import Slo
from scheduler.simulate.command import simulate
from scheduler.simulate.fleet import FleetSettings
from scheduler.simulate.fleet_costs import read_costs
from scheduler.simulate.options import LoadOptions

WORKERS = (1, 8, 64)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A way to hold prompts."""

    name: str
    policy: Literal["fixed", "adaptive"]
    max_requests: int
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A trace, and how fast it is played for each prefill worker."""

    name: str
    file: str
    speed_up: float


POLICIES = (
    Policy(name="N=8, 20 ms", policy="fixed", max_requests=8, timeout_s=0.02),
    Policy(name="no hold", policy="fixed", max_requests=8, timeout_s=0.0),
    Policy(name="adaptive", policy="adaptive", max_requests=16, timeout_s=0.05),
)
TRACES = (
    Trace(name="Azure conversation", file="AzureLLMInferenceTrace_conv.csv.gz", speed_up=3.0),
    Trace(name="Azure code", file="AzureLLMInferenceTrace_code.csv.gz", speed_up=3.0),
    Trace(name="Mooncake conversation", file="mooncake_conversation_trace.jsonl.gz", speed_up=0.4),
)


def play(trace: Trace, policy: Policy, workers: int, num_requests: int) -> dict[str, Any]:
    """Simulate one case; return its figures."""
    load = LoadOptions(
        trace=str(SHARED / "data" / trace.file),
        speed_up=trace.speed_up * workers,
        repeat=1,
        requests=num_requests,
        seed=0,
    )
    settings = FleetSettings(
        prefill_workers=workers,
        decode_workers=workers,
        batch_policy=policy.policy,
        max_batch_requests=policy.max_requests,
        batch_timeout_s=policy.timeout_s,
        max_queued_requests=100_000,
        max_queued_tokens=10**9,
        prefix_cache=False,
    )
    return simulate(settings, read_costs("h200-qwen3-8b"), load, slo=Slo())[0]


def draw(rows: list[tuple[Trace, Policy, int, dict[str, Any]]], path: Path) -> None:
    """Draw p50 and p99 of each case, one panel a trace."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure, axes = plt.subplots(1, len(TRACES), figsize=(15, 4.5), layout="constrained")
    for axis, trace in zip(axes, TRACES, strict=True):
        for i, policy in enumerate(POLICIES):
            own = [(n, f["ttft_ms"]) for t, p, n, f in rows if t is trace and p is policy]
            x = [WORKERS.index(n) + 0.2 * (i - 1) for n, _ in own]
            axis.vlines(
                x,
                [f["p50"] for _, f in own],
                [f["p99"] for _, f in own],
                color=f"C{i}",
                linewidth=6,
                alpha=0.5,
            )
            axis.plot(x, [f["p50"] for _, f in own], "o", color=f"C{i}", label=policy.name)
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set_xticks(range(len(WORKERS)), [f"{n} worker{'s' if n > 1 else ''}" for n in WORKERS])
        axis.set_title(trace.name)
        axis.grid(axis="y", which="both", alpha=0.2)
    axes[0].set_ylabel("TTFT in ms, p50 (dot) to p99")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(POLICIES))
    figure.savefig(path, dpi=90)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=8000, help="of each trace (default 8000)")
    parser.add_argument("--plot", type=Path, help="write a picture to this file (needs matplotlib)")
    options = parser.parse_args()
    rows = []
    print("| Trace | prefill workers | busy | policy | TTFT p50 ms | p99 ms | requests a batch |")
    print("|---|---|---|---|---|---|---|")
    for trace in TRACES:
        for workers in WORKERS:
            for policy in POLICIES:
                figures = play(trace, policy, workers, options.requests)
                rows.append((trace, policy, workers, figures))
                ttft = figures["ttft_ms"]
                print(
                    f"| {trace.name} | {workers} | {figures['prefill_utilisation']:.0%} | {policy.name} | "
                    f"{ttft['p50']:,.0f} | {ttft['p99']:,.0f} | {figures['batches']['mean_requests']:.2f} |",
                    flush=True,
                )
    if options.plot is not None:
        draw(rows, options.plot)


if __name__ == "__main__":
    main()
