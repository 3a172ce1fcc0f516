"""The cost model of a service that runs: what its workers measured at their start, and what it takes when idle."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path

from scheduler.errors import ConfigError
from scheduler.messages import DecodeWorkerInfo, PrefillWorkerInfo
from scheduler.simulate.calibrate import Ask, Calibration, calibrate
from scheduler.simulate.fleet_costs import FleetCosts

_IN_TURNS = 2.0
"""How many times as long what computes on a device takes while something else computes there, too."""


def measure(
    ask: Ask,
    prefill: PrefillWorkerInfo,
    decode: DecodeWorkerInfo,
    *,
    max_batch_requests: int,
    max_batch_tokens: int | None,
    takes_whole_groups: bool,
    is_device_shared: bool,
) -> FleetCosts:
    """Calibrate an idle service with such workers, and return its costs. Raises `ConfigError` if it does not answer.

    `takes_whole_groups`: its policy makes one batch of as many prompts as a batch may have, if they come together.
    """
    buckets = sorted({int(name.partition("x")[0]) for name in prefill.bucket_seconds})
    steps = sorted(int(name.partition("x")[0]) for name in decode.bucket_seconds)
    calibration = calibrate(
        ask,
        prefill_tokens=[size for size in buckets if max_batch_tokens is None or size <= max_batch_tokens],
        max_slots=max_batch_requests if takes_whole_groups else 1,
        # Larger ones would take several prefills to begin.
        step_sizes=[size for size in steps if size <= max_batch_requests] or steps[:1],
        max_model_len=prefill.model.max_model_len,
    )
    return measured_costs(
        prefill, decode, calibration, is_device_shared=is_device_shared, when=datetime.now(UTC)
    )


def measured_costs(
    prefill: PrefillWorkerInfo,
    decode: DecodeWorkerInfo,
    calibration: Calibration,
    *,
    is_device_shared: bool,
    when: datetime,
) -> FleetCosts:
    """Return the costs of workers from what they measured when they started, and from a calibration after that.

    Buckets that the calibration lacks take what was measured at the start, times what the nearest took more in it.
    Raises `ConfigError` if a worker has measured nothing.
    """
    here = f"{prefill.model.name} on {prefill.device}, {when:%Y-%m-%d}, `purefill serve --write-cost-model`"
    idle = f"requests to the idle service: {here}"
    start_s = calibration.start_s / 2
    slowdown = _IN_TURNS if is_device_shared else 1.0
    turns = "not measured: two that compute at once on one device take turns"
    return FleetCosts(
        name=f"{prefill.model.name} on {prefill.device}",
        prefill_seconds=without_hiccups(calibrated(prefill.bucket_seconds, calibration.prefill_seconds)),
        decode_seconds=without_hiccups(calibrated(decode.bucket_seconds, calibration.step_seconds)),
        decode_seconds_per_context_token=calibration.seconds_per_context_token,
        attention_seconds_per_pair=calibration.attention_seconds_per_pair,
        page_size=decode.pool.page_size,
        num_pages=decode.pool.num_pages - 1,
        max_model_len=prefill.model.max_model_len,
        message_s=start_s,
        http_s=max(0.0, calibration.around_s - start_s),
        prefill_slowdown=slowdown,
        decode_slowdown=slowdown,
        sources={
            "prefill_seconds": f"full batches of equal prompts, {idle}; scaled from the start's where too long for it",
            "decode_seconds": f"gaps between tokens, {idle}; scaled from the start's for more than a batch",
            "decode_seconds_per_context_token": f"a long prompt's gaps, {idle}",
            "attention_seconds_per_pair": f"one long prompt against a batch of as many tokens, {idle}",
            "message_s": f"half of what a second token takes longer than a third, {idle}",
            "http_s": f"time to a first token less queue, hold, prefill and message, {idle}",
        }
        | dict.fromkeys(
            ("prefill_slowdown", "decode_slowdown"), turns if is_device_shared else "no shared device"
        ),
    )


def calibrated(at_start: Mapping[str, float], seconds: Mapping[int, float]) -> dict[str, float]:
    """Return the seconds of each bucket: as calibrated, or by the ratio of the nearest bucket that is."""
    ratios = {
        size: seconds[size] / at_start[name]
        for name in at_start
        if (size := int(name.partition("x")[0])) in seconds
    }
    result: dict[str, float] = {}
    for name, own in at_start.items():
        size = int(name.partition("x")[0])
        nearest = min(ratios, key=lambda known: abs(known - size), default=None)
        result[name] = own if nearest is None else own * ratios[nearest]
    return result


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
