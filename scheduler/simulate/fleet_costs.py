"""What a fleet's workers take and hold: the file that `purefill serve --write-cost-model` writes."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from importlib.resources import files
from math import inf
from pathlib import Path
from typing import Any

from graphs.buckets import plan_passes
from scheduler.batching.cost_model import CostModel, seconds_by_tokens
from scheduler.errors import ConfigError

_FORMAT = "purefill-fleet-costs-1"


class CostModelError(ConfigError):
    """A cost model says too little, or what cannot be; the message names the field."""

    def __init__(self, key: str, message: str) -> None:
        """`key`: the field or bucket, as it stands in a file."""
        super().__init__(message)
        self.key = key


@dataclass(frozen=True, kw_only=True)
class FleetCosts:
    """Times and sizes of one kind of worker for one model. Raises `CostModelError` naming the field that is wrong."""

    name: str
    prefill_seconds: Mapping[str, float]
    """Seconds of a full batch, by bucket: ``512x8``, tokens by slots."""
    decode_seconds: Mapping[str, float]
    """Seconds of a step over no context, by the sequences of its bucket: ``64x64``, or ``64`` for short."""
    decode_seconds_per_context_token: float
    """What each token that a step attends to adds."""
    page_size: int
    """Tokens per KV page."""
    num_pages: int
    """Pages of one decode worker that can be leased."""
    max_model_len: int
    attention_seconds_per_pair: float = 0.0
    """What each pair of a prompt's tokens adds to a prefill beyond those that the buckets were measured with."""
    message_s: float = 0.0
    """One way of a message between scheduler and worker."""
    http_s: float = 0.0
    """From a client to the scheduler's queue, and from a worker's first token to the client, together."""
    prefill_slowdown: float = 1.0
    """How many times as long a prefill takes while the decode worker on its device computes."""
    decode_slowdown: float = 1.0
    """How many times as long a decode step takes while the prefill worker on its device computes."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Of each figure: measured by which script and when, or how it was derived."""

    def __post_init__(self) -> None:
        for name, table in (
            ("prefill_seconds", self.prefill_seconds),
            ("decode_seconds", self.decode_seconds),
        ):
            if not table:
                raise CostModelError(name, f"{name} of cost model {self.name} must hold at least one bucket")
            for bucket, seconds in table.items():
                if not _is_bucket(bucket) or not _is_number(seconds) or not 0 < seconds < inf:
                    raise CostModelError(
                        bucket,
                        f"{name} of cost model {self.name} must hold seconds > 0 by buckets such as 512x8, "
                        f"got {bucket}: {seconds}",
                    )
        least = {
            "page_size": 1,
            "num_pages": 1,
            "max_model_len": 2,
            "prefill_slowdown": 1,
            "decode_slowdown": 1,
        }
        at_least_0 = ("decode_seconds_per_context_token", "attention_seconds_per_pair", "message_s", "http_s")
        for name, low in (least | dict.fromkeys(at_least_0, 0)).items():
            value = getattr(self, name)
            if not _is_number(value) or not low <= value < inf:
                raise CostModelError(
                    name, f"{name} of cost model {self.name} must be a number >= {low}, got {value!r}"
                )

    @property
    def is_device_shared(self) -> bool:
        """Whether a prefill and a decode worker compute on one device."""
        return self.prefill_slowdown > 1 or self.decode_slowdown > 1

    def check(self, *, max_num_seqs: int) -> None:
        """Raise `CostModelError` if a step of so many sequences has no bucket."""
        most = len(self.step_seconds) - 1
        if max_num_seqs > most:
            raise CostModelError(
                "decode_seconds",
                f"decode_seconds of cost model {self.name} must have a bucket of {max_num_seqs} sequences "
                f"(max_num_seqs), the largest is {most}",
            )

    @cached_property
    def prefill_table(self) -> CostModel:
        """The seconds of each token bucket."""
        return CostModel(seconds_by_tokens(self.prefill_seconds))

    @cached_property
    def step_seconds(self) -> list[float]:
        """Seconds of a decode step of so many sequences, what their context adds not counted."""
        table = seconds_by_tokens(self.decode_seconds)
        sizes = sorted(table)
        return [table[sizes[bisect_left(sizes, n)]] for n in range(sizes[-1] + 1)]

    @cached_property
    def _max_slots(self) -> int:
        return max(int(bucket.partition("x")[2] or 1) for bucket in self.prefill_seconds)

    def prefill(
        self, lengths: Sequence[int], max_slots: int, cached: Sequence[int] | None = None
    ) -> tuple[float, int]:
        """Return the seconds of a batch of prompts of so many tokens, and its padding tokens.

        `cached`: how many of each prompt's first tokens need not be computed, if any need not.
        It is cut into passes as a worker does it that captured `max_slots` slots.
        """
        starts = cached or [0] * len(lengths)
        table, total = self.prefill_table, sum(lengths) - sum(starts)
        if total <= table.max_tokens and len(lengths) <= max_slots:
            totals = [total]
        else:
            passes = plan_passes(lengths, max_tokens=table.max_tokens, max_slots=max_slots, starts=starts)
            totals = [sum(segment.end - segment.start for segment in segments) for segments in passes]
        padded = [table.padded(num_tokens) for num_tokens in totals]
        seconds = sum(map(table.seconds, totals))
        if self.attention_seconds_per_pair:
            pairs = sum([n * n - start * start for n, start in zip(lengths, starts, strict=True)]) / 2
            measured = sum(num_tokens * num_tokens for num_tokens in padded) / (2 * self._max_slots)
            seconds += self.attention_seconds_per_pair * max(0.0, pairs - measured)
        return seconds, sum(padded) - total

    def on_other_gpu(self, *, flops_ratio: float, bandwidth_ratio: float) -> FleetCosts:
        """Return a roofline extrapolation to a GPU of so many times the FLOP/s and the memory bandwidth."""
        for name, value in (("flops_ratio", flops_ratio), ("bandwidth_ratio", bandwidth_ratio)):
            if not 0 < value < inf:
                raise ConfigError(f"{name} must be > 0, got {value}")
        reading = min(self.prefill_seconds.values()) / bandwidth_ratio
        derived = (
            f"roofline extrapolation from {self.name}: {flops_ratio:g} times its FLOP/s, {bandwidth_ratio:g} times "
            "its bandwidth; not measured"
        )
        return replace(
            self,
            name=f"{self.name} (roofline, FLOP/s x {flops_ratio:g}, bandwidth x {bandwidth_ratio:g})",
            prefill_seconds={b: max(reading, s / flops_ratio) for b, s in self.prefill_seconds.items()},
            decode_seconds={b: s / bandwidth_ratio for b, s in self.decode_seconds.items()},
            decode_seconds_per_context_token=self.decode_seconds_per_context_token / bandwidth_ratio,
            attention_seconds_per_pair=self.attention_seconds_per_pair / flops_ratio,
            sources=dict.fromkeys(("prefill_seconds", "decode_seconds"), derived),
        )

    def to_json(self) -> str:
        """Write the file's text."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1) + "\n"


def shipped_costs() -> dict[str, Path]:
    """Return the files of the cost models that come with purefill, by name."""
    folder = Path(str(files("scheduler.simulate"))) / "costs"
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def read_costs(name: str, *, max_num_seqs: int = 1) -> FleetCosts:
    """Read a shipped cost model by its name, or a file.

    Raises `ConfigError` if it is none, or lacks a bucket for steps of `max_num_seqs` sequences; for what is wrong in a
    file it names the line.
    """
    shipped = shipped_costs()
    path = shipped.get(name, Path(name))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cost_model must be a file or one of {', '.join(shipped)}, got {name} ({error.__class__.__name__})"
        ) from error
    try:
        data: Any = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"cost model {path} is not JSON: {error}") from error
    if not isinstance(data, dict) or data.pop("format", None) != _FORMAT:
        raise ConfigError(f"cost model {path} must be a JSON object of format {_FORMAT}")
    known = {f.name: f for f in fields(FleetCosts)}
    for key in data:
        if key not in known:
            raise ConfigError(f"{_at(path, text, key)}: cost model holds an unknown field {key}")
    missing = [f for f in ("name", *_REQUIRED) if f not in data]
    if missing:
        raise ConfigError(f"cost model {path} lacks the field {missing[0]}")
    for key in ("prefill_seconds", "decode_seconds", "sources"):
        if not isinstance(data.get(key, {}), dict):
            raise ConfigError(f"{_at(path, text, key)}: {key} must be a JSON object")
    try:
        costs = FleetCosts(**data)
        costs.check(max_num_seqs=max_num_seqs)
    except CostModelError as error:
        raise ConfigError(f"{_at(path, text, error.key)}: {error}") from error
    return costs


def _at(path: Path, text: str, key: str) -> str:
    """Return where in a file a key stands."""
    before, found, _ = text.partition(json.dumps(key))
    return f"{path}, line {1 + before.count(chr(10))}" if found else str(path)


_REQUIRED = (
    "prefill_seconds",
    "decode_seconds",
    "decode_seconds_per_context_token",
    "page_size",
    "num_pages",
    "max_model_len",
)


def _is_bucket(name: str) -> bool:
    parts = name.split("x")
    return len(parts) <= 2 and all(part.isdecimal() and int(part) > 0 for part in parts)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
