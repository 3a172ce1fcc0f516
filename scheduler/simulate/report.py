"""What a simulation found, as a JSON object and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduler.simulate.collector import Collector, Slo
from scheduler.simulate.fleet import FleetSettings
from scheduler.simulate.fleet_costs import FleetCosts
from scheduler.simulate.histogram import LogHistogram

_QUANTILES = (0.5, 0.9, 0.99)


def summarize(
    settings: FleetSettings,
    costs: FleetCosts,
    collector: Collector,
    *,
    load: str,
    slo: Slo,
    gpu_price_per_hour: float | None,
) -> dict[str, Any]:
    """Return all figures of a run. The same run gives the same object, to the last digit."""
    c, seconds = collector, collector.seconds
    num_tokens = c.num_prompt_tokens + c.num_output_tokens
    summary: dict[str, Any] = {
        "load": load,
        "cost_model": {"name": costs.name, "sources": dict(costs.sources)},
        "fleet": {
            "prefill_workers": settings.prefill_workers,
            "decode_workers": settings.decode_workers,
            "batch_policy": settings.batch_policy,
            "max_batch_requests": settings.max_batch_requests,
            "batch_timeout_ms": _round(1000 * settings.batch_timeout_s),
            "max_batch_tokens": settings.max_batch_tokens,
            "max_num_seqs": settings.max_num_seqs,
            "prefix_cache": settings.prefix_cache,
            "seed": settings.seed,
        },
        "seconds": _round(seconds),
        "requests": c.num_requests,
        "outcomes": dict(sorted(c.outcomes.items())),
        "requests_per_s": _rate(c.num_requests, seconds),
        "prompt_tokens_per_s": _rate(c.num_prompt_tokens, seconds),
        "output_tokens_per_s": _rate(c.num_output_tokens, seconds),
        "ttft_ms": _latency(c.ttft),
        "queued_ms": _latency(c.queued),
        "itl_ms": _latency(c.itl),
        "e2e_ms": _latency(c.e2e),
        "batches": {
            "count": c.batch_requests.total(),
            "mean_requests": _rate(sum(n * k for n, k in c.batch_requests.items()), c.batch_requests.total()),
            "by_requests": {str(n): k for n, k in sorted(c.batch_requests.items())},
            "by_reason": dict(sorted(c.reasons.items())),
            "padding_share": _rate(c.num_padding, c.num_batch_tokens + c.num_padding),
        },
        "cached_share": _rate(c.num_cached_tokens, c.num_query_tokens),
        "prefill_utilisation": _rate(c.prefill_busy_s, seconds * settings.prefill_workers),
        "decode_utilisation": _rate(c.decode_busy_s, seconds * settings.decode_workers),
        "queue_over_time": {
            "bin_s": c.queue_over_time.width_s,
            "most_waiting": [int(most) for _, most in c.queue_over_time.points()],
        },
        "requeues": dict(sorted(c.requeues.items())),
        "worker_deaths": c.num_deaths,
        "gpus": settings.num_gpus,
    }
    if str(slo):
        summary["slo"] = str(slo)
        summary["good_share"] = _round(c.good_share)
        summary["goodput_per_s"] = _rate(c.num_good, seconds)
    if gpu_price_per_hour is not None:
        cost = gpu_price_per_hour * settings.num_gpus * seconds / 3600
        summary["gpu_price_per_hour"] = gpu_price_per_hour
        summary["cost_per_million_tokens"] = _rate(1e6 * cost, num_tokens)
        summary["cost_per_million_output_tokens"] = _rate(1e6 * cost, c.num_output_tokens)
    return summary


def table(summary: Mapping[str, Any]) -> str:
    """Return the figures as lines for a terminal."""
    fleet, batches = summary["fleet"], summary["batches"]
    rows = [
        ("load", f"{summary['load']}: {summary['requests']:,} requests in {summary['seconds']:,.1f} s"),
        ("cost model", summary["cost_model"]["name"]),
        (
            "fleet",
            f"{fleet['prefill_workers']} prefill, {fleet['decode_workers']} decode, {fleet['batch_policy']}, "
            f"{fleet['max_batch_requests']} requests or {fleet['batch_timeout_ms']:g} ms",
        ),
        ("outcomes", _counts(summary["outcomes"])),
    ]
    for name, label in (
        ("ttft_ms", "TTFT"),
        ("queued_ms", "of it queue"),
        ("itl_ms", "inter-token"),
        ("e2e_ms", "whole"),
    ):
        latency = summary[name]
        figures = "  ".join(f"p{100 * q:g} {latency[f'p{100 * q:g}']:,.1f}" for q in _QUANTILES)
        rows.append((f"{label}, ms", f"mean {latency['mean']:,.1f}  {figures}"))
    rows += [
        (
            "batches",
            f"{batches['count']:,} of {batches['mean_requests']:.2f} requests, padding {batches['padding_share']:.1%}; "
            f"{_counts(batches['by_reason'])}",
        ),
        ("prefix cache", f"{summary['cached_share']:.1%} of the tokens of prompts were found"),
        (
            "busy",
            f"prefill {summary['prefill_utilisation']:.0%}, decode {summary['decode_utilisation']:.0%}",
        ),
        (
            "per second",
            f"{summary['requests_per_s']:,.2f} requests, {summary['prompt_tokens_per_s']:,.0f} prompt and "
            f"{summary['output_tokens_per_s']:,.0f} answer tokens",
        ),
    ]
    if summary["requeues"] or summary["worker_deaths"]:
        rows.append(("requeues", f"{_counts(summary['requeues'])}; {summary['worker_deaths']} worker deaths"))
    if "slo" in summary:
        kept = f"{summary['good_share']:.2%} keep it, {summary['goodput_per_s']:,.2f} a second"
        rows.append((f"SLO {summary['slo']}", kept))
    if "cost_per_million_tokens" in summary:
        rows.append(
            (
                "cost",
                f"{summary['cost_per_million_tokens']:.4f} per million tokens, "
                f"{summary['cost_per_million_output_tokens']:.4f} per million answer tokens, "
                f"{summary['gpus']} GPUs at {summary['gpu_price_per_hour']:g} an hour",
            )
        )
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _latency(histogram: LogHistogram) -> dict[str, float]:
    quantiles = {f"p{100 * q:g}": _round(1000 * histogram.quantile(q)) for q in _QUANTILES}
    return {"mean": _round(1000 * histogram.mean), **quantiles}


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items()) or "none"


def _rate(amount: float, whole: float) -> float:
    return _round(amount / whole) if whole else 0.0


def _round(value: float) -> float:
    return float(f"{value:.6g}")
