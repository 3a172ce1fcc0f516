"""The cost model of a service that runs, from what its workers measured when they started."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path

from scheduler.errors import ConfigError
from scheduler.messages import DecodeWorkerInfo, PrefillWorkerInfo
from scheduler.simulate.fleet_costs import FleetCosts

_SHARED_SLOWDOWN = 2.0


def measured_costs(
    prefill: PrefillWorkerInfo, decode: DecodeWorkerInfo, *, is_device_shared: bool
) -> FleetCosts:
    """Return the costs of such workers; `is_device_shared` says whether both compute on one device.

    Raises `ConfigError` if a worker has measured nothing.
    """
    when = "measured by `purefill serve --write-cost-model` when its workers started"
    sources = {
        "prefill_seconds": f"{when}: {prefill.model.name} on {prefill.device}, full batches of equal prompts",
        "decode_seconds": f"{when}: steps over hardly any context",
        "decode_seconds_per_context_token": "not measured, taken as 0",
        "attention_seconds_per_pair": "not measured, taken as 0",
        "message_s": "not measured, taken as 0",
        "http_s": "not measured, taken as 0",
    }
    if is_device_shared:
        sources["shared_slowdown"] = "not measured: two processes that take turns"
    return FleetCosts(
        name=f"{prefill.model.name} on {prefill.device}",
        prefill_seconds=without_hiccups(prefill.bucket_seconds),
        decode_seconds=without_hiccups(decode.bucket_seconds),
        decode_seconds_per_context_token=0.0,
        page_size=decode.pool.page_size,
        num_pages=decode.pool.num_pages - 1,
        max_model_len=prefill.model.max_model_len,
        shared_slowdown=_SHARED_SLOWDOWN if is_device_shared else 1.0,
        sources=sources,
    )


def without_hiccups(bucket_seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each bucket, none more than those of a bucket that is larger.

    A batch of fewer tokens never takes longer. Where it was measured so, something else ran meanwhile, which only ever
    adds time.
    """
    by_size = sorted(
        bucket_seconds.items(), key=lambda item: tuple(map(int, item[0].split("x"))), reverse=True
    )
    least = accumulate((seconds for _, seconds in by_size), min)
    return dict(reversed([(name, seconds) for (name, _), seconds in zip(by_size, least, strict=True)]))


def write_costs(path: Path, costs: FleetCosts) -> None:
    """Write a cost model. Raises `ConfigError` if the file cannot be written."""
    try:
        path.write_text(costs.to_json(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"write_cost_model: {path} cannot be written: {error.strerror}") from error
