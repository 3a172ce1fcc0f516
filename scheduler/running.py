"""A service that is up, and what it says of itself when it is."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from scheduler.config import ServeConfig
from scheduler.messages import DecodeWorkerInfo, PrefillWorkerInfo

_LOG = logging.getLogger("purefill")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningService:
    """A service that is up."""

    url: str
    dashboard_url: str | None
    decode: tuple[DecodeWorkerInfo, ...]
    prefill: tuple[PrefillWorkerInfo, ...]
    scheduler: Any
    """Its actor."""
    api_servers: tuple[Any, ...]
    """Their actors."""


def _graphs(info: PrefillWorkerInfo) -> str:
    return "CUDA graphs and static buffers" if info.uses_cuda_graphs else "static buffers"


def _transports(service: RunningService) -> str:
    """Return how pages travel, and where more ways than one, how many pairs of workers use each."""
    ways = Counter(way for info in service.prefill for way in info.transports.values())
    return next(iter(ways)) if len(ways) == 1 else ", ".join(f"{way} ({n} pairs)" for way, n in ways.items())


def _of_ranks(num_ranks: int) -> str:
    return f" of {num_ranks} ranks" if num_ranks > 1 else ""


def _with_port(url: str, port: int | None) -> str:
    return url if port is None else f"{url.rpartition(':')[0]}:{port}"


def print_summary(config: ServeConfig, service: RunningService, seconds: float) -> None:
    """Print what runs, in a few lines."""
    decode, prefill = service.decode[0], service.prefill[0]
    model, pool = decode.model, decode.pool
    pool_bytes = pool.size_bytes * (1 + len(pool.shards))
    tokens = sorted({int(name.split("x")[0]) for name in prefill.buckets})
    slots = sorted({int(name.split("x")[1]) for name in prefill.buckets})
    mib, ranks = 1024 * 1024, config.num_ranks
    unit = "rank" if ranks["decode"] > 1 else "worker"
    rows = {
        "model": f"{model.name}, {model.num_parameters / 1e6:.0f} M parameters, {model.dtype} on "
        f"{decode.device}, {decode.weights_bytes / mib:.0f} MiB per decode {unit}, context {model.max_model_len}",
        "batches": f"{config.batch_policy}, {config.max_batch_requests} requests or {config.batch_timeout_ms:g} ms",
        "buckets": f"{' '.join(map(str, tokens))} tokens x {' '.join(map(str, slots))} slots, "
        f"{prefill.graph_bytes / mib:.1f} MiB of {_graphs(prefill)}, warm in {prefill.warmup_seconds:.1f} s",
        "KV pages": f"{pool.num_pages - 1} of {pool.page_size} tokens per decode worker, "
        f"{pool_bytes / mib:.0f} MiB by {_transports(service)}, at most {decode.max_num_seqs} sequences",
        "actors": f"{config.api_servers} ApiServer, 1 Scheduler, {len(service.prefill)} PrefillWorker"
        f"{_of_ranks(ranks['prefill'])}, {len(service.decode)} DecodeWorker{_of_ranks(ranks['decode'])}",
        "API": f"{service.url}/v1/completions",
        "metrics": f"{_with_port(service.url, config.metrics_port)}/metrics",
        # Ray asks for the token of its cluster, which a browser does not have yet.
        "dashboard": f"{service.dashboard_url} (token: ray get-auth-token)"
        if service.dashboard_url
        else "none",
    }
    ready = f"version {version('purefill')} is ready after {seconds:.1f} s"
    if config.log_format == "json":
        _LOG.info(ready, extra={"fields": rows})
        return
    _LOG.info(ready)
    for name, value in rows.items():
        print(f"  {name:<10}{value}", file=sys.stderr, flush=True)
