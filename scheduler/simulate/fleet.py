"""What is simulated: the fleet, its policy and its limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scheduler.errors import ConfigError
from scheduler.simulate.fleet_costs import FleetCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """How often workers die. Times are exponentially distributed."""

    mtbf_s: float
    """Mean time between the failures of one worker."""
    repair_s: float
    """Mean time until it is back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """A fleet, named as the options of `purefill serve`. Raises `ConfigError`, naming the setting."""

    prefill_workers: int = 1
    decode_workers: int = 1
    batch_policy: Literal["fixed", "adaptive"] = "fixed"
    max_batch_requests: int = 8
    batch_timeout_s: float = 0.02
    max_batch_tokens: int | None = None
    max_num_seqs: int = 64
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1_048_576
    prefix_cache: bool = True
    """Whether what a trace says of equal prefixes is made use of."""
    failures: Failures | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "prefill_workers", "decode_workers", "max_batch_requests", "max_batch_tokens", "max_num_seqs",
            "max_queued_requests", "max_queued_tokens",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be >= 1, got {value}")
        if not self.batch_timeout_s >= 0:
            raise ConfigError(f"batch_timeout_ms must be >= 0, got {1000 * self.batch_timeout_s:g}")
        if self.max_batch_requests > self.max_num_seqs:
            raise ConfigError(
                f"max_batch_requests must be <= max_num_seqs, which is {self.max_num_seqs}, "
                f"got {self.max_batch_requests}"
            )
        if self.failures is not None:
            for name, seconds in (("mtbf_s", self.failures.mtbf_s), ("repair_s", self.failures.repair_s)):
                if not seconds > 0:
                    raise ConfigError(f"{name} must be > 0, got {seconds:g}")

    @property
    def num_gpus(self) -> int:
        """One for each worker."""
        return self.prefill_workers + self.decode_workers

    def check(self, costs: FleetCosts) -> None:
        """Raise `ConfigError` if a cost model says too little for this fleet."""
        costs.check(max_num_seqs=self.max_num_seqs)
