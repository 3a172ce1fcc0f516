"""Compare batch policies: the time to first token that each gives under the same loads.

The real batch former runs on a virtual clock; a stub worker takes what Qwen3-8B takes on one H200 for a batch's
bucket. So the times are those of queueing, holding and prefill, without network and tokenising.

    python -m benchmarks.batching                       a few minutes
    python -m benchmarks.batching --seeds 1 --seconds 10    a quick look
    python -m benchmarks.batching --plot docs/batching.png  draws them
    python -m benchmarks.batching --real 8              and the real front against Ray Serve's @serve.batch
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from benchmarks import h200
from benchmarks.loads import Load, azure_code, fan_outs, poisson
from benchmarks.serve_batch import compare
from benchmarks.virtual import Outcome, Setting, run

FIXED = tuple(Setting("fixed", n, ms / 1000) for n in (1, 4, 8, 16) for ms in (5, 20, 50))
DEFAULT = Setting("fixed", 8, 0.02)
ADAPTIVE = Setting("adaptive", 16, 0.05)
Results = dict[Setting, list[Outcome]]


def loads(seconds: float) -> list[Callable[[int], Load | None]]:
    """Return what makes each load from a seed."""
    return [
        lambda seed: poisson(50, seconds=seconds, seed=seed),
        lambda seed: poisson(200, seconds=seconds, seed=seed),
        lambda seed: poisson(800, seconds=seconds, seed=seed),
        lambda seed: poisson(800, seconds=seconds, seed=seed, medium=True),
        lambda seed: fan_outs(200, seconds=seconds, seed=seed),
        lambda seed: azure_code(1) if seed == 0 else None,
        lambda seed: azure_code(8) if seed == 0 else None,
    ]


def p99(outcomes: list[Outcome]) -> float:
    """Return the p99 TTFT in seconds, as the mean over seeds."""
    return fmean(outcome.quantile(0.99) for outcome in outcomes)


def play(make: Callable[[int], Load | None], num_seeds: int, num_workers: int) -> tuple[Load, Results] | None:
    """Run one load with every setting and seed, and print a line for each setting."""
    made = [load for seed in range(num_seeds) if (load := make(seed)) is not None]
    if not made:
        return None
    cost_model = h200.qwen3_8b()
    load = made[0]
    demand = fmean(one.tokens_per_s for one in made) * cost_model.saturated_seconds_per_token / num_workers
    note = ", more than the workers can do: the queue grows until the load ends" if demand > 1 else ""
    if 0.9 < demand <= 1:
        note = ", close to what the workers can do"
    print(f"\n{load.name}: {100 * demand:.0f} % of capacity in full buckets{note}")
    print(
        f"{'':22}{'TTFT ms p50':>13}{'p90':>11}{'p99':>11}{'batch':>8}{'padding':>9}{'busy':>7}"
        f"{f'good/s ({1000 * load.ttft_target_s:g} ms)':>20}"
    )
    results: Results = {}
    for setting in (*FIXED, ADAPTIVE):
        outcomes = [run(one, setting, cost_model, num_workers=num_workers) for one in made]
        results[setting] = outcomes
        p50, p90 = (1000 * fmean(o.quantile(q) for o in outcomes) for q in (0.5, 0.9))
        reasons = ""
        if setting == ADAPTIVE:
            reasons = "  " + ", ".join(f"{n} {reason}" for reason, n in outcomes[0].reasons.most_common())
        print(
            f"{setting!s:22}{p50:13.1f}{p90:11.1f}{1000 * p99(outcomes):11.1f}"
            f"{fmean(o.mean_batch for o in outcomes):8.2f}"
            f"{fmean(o.padding_share for o in outcomes):9.1%}{fmean(o.busy for o in outcomes):7.0%}"
            f"{fmean(o.goodput for o in outcomes):20.1f}{reasons}"
        )
    best = min(FIXED, key=lambda setting: p99(results[setting]))
    ratio = p99(results[ADAPTIVE]) / p99(results[best])
    gain = 1 - p99(results[ADAPTIVE]) / p99(results[DEFAULT])
    worst = max(
        results[ADAPTIVE][i].quantile(0.99) / min(results[s][i].quantile(0.99) for s in FIXED)
        for i in range(len(made))
    )
    print(
        f"adaptive p99 is {ratio:.2f}x that of the best fixed setting ({best}), {gain:.0%} below {DEFAULT}; "
        f"worst seed against its own best fixed setting: {worst:.2f}x"
    )
    return load, results


def draw(played: list[tuple[Load, Results]], path: Path) -> None:
    """Draw p50 to p99 of each setting, one panel a load."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import StrMethodFormatter

    figure, axes = plt.subplots(2, (len(played) + 1) // 2, figsize=(17, 8), layout="constrained")
    for axis in axes.flat[len(played) :]:
        axis.axis("off")
    for axis, (load, results) in zip(axes.flat, played, strict=False):
        for x, (setting, outcomes) in enumerate(results.items()):
            p50, top = (1000 * fmean(o.quantile(q) for o in outcomes) for q in (0.5, 0.99))
            color = {ADAPTIVE: "tab:green", DEFAULT: "tab:orange"}.get(setting, "tab:blue")
            axis.plot([x, x], [p50, top], color=color, linewidth=6, solid_capstyle="butt", alpha=0.45)
            axis.plot([x], [p50], "o", color=color)
            axis.plot([x], [top], "_", color=color, markersize=12, markeredgewidth=3)
        axis.axhline(1000 * p99(results[ADAPTIVE]), color="tab:green", linewidth=0.8, linestyle=":")
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axis.yaxis.set_minor_formatter(StrMethodFormatter("{x:,.0f}"))
        axis.tick_params(axis="y", which="both", labelsize=7)
        axis.set_title(load.name, fontsize=10)
        labels = [
            "adaptive" if s == ADAPTIVE else f"{s.max_requests}/{1000 * s.timeout_s:g}" for s in results
        ]
        axis.set_xticks(range(len(labels)), labels, rotation=90, fontsize=8)
        axis.grid(axis="y", which="both", alpha=0.2)
    for axis in axes[:, 0]:
        axis.set_ylabel("TTFT in ms, p50 (dot) to p99 (bar)")
    figure.suptitle(
        "Time to first token by batch policy: fixed N / timeout in ms (orange: the default), and adaptive. "
        "One worker with the times of Qwen3-8B on an H200; virtual clock."
    )
    figure.savefig(path, dpi=90)
    print(f"\ndrew {path}")


def main() -> None:
    """Run all loads, print the tables and whether the goals are met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5, help="seeds of the random loads (default 5)")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of the random loads (default 30)")
    parser.add_argument("--prefill-workers", type=int, default=1)
    parser.add_argument("--plot", type=Path, help="write a picture to this file (needs matplotlib)")
    parser.add_argument(
        "--real",
        type=float,
        metavar="SECONDS",
        help="then measure the real front against @serve.batch, so long at each setting (needs ray[serve])",
    )
    options = parser.parse_args()
    played = [
        one
        for make in loads(options.seconds)
        if (one := play(make, options.seeds, options.prefill_workers)) is not None
    ]
    print("\nGoals, p99 TTFT:")
    ratios = {load.name: p99(r[ADAPTIVE]) / min(p99(r[s]) for s in FIXED) for load, r in played}
    gains = {load.name: 1 - p99(r[ADAPTIVE]) / p99(r[DEFAULT]) for load, r in played}
    print(f"  at most 1.05x the best fixed setting at any load: at most {max(ratios.values()):.2f}x")
    print(f"  at least 25 % below {DEFAULT} at its worst load: {max(gains.values()):.0%} below")
    if options.plot is not None:
        draw(played, options.plot)
    if options.real is not None:
        compare(options.real)


if __name__ == "__main__":
    main()
