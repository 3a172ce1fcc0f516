"""Loads for benchmarks: when requests arrive and how many tokens their prompts have."""

from __future__ import annotations

import csv
import gzip
import os
import random
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

SHARED = Path(os.environ.get("SHARED_DIR", Path(__file__).resolve().parents[2] / "shared"))
AZURE_CODE_TRACE = SHARED / "data" / "AzureLLMInferenceTrace_code.csv.gz"


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests in order of arrival."""

    name: str
    arrivals: tuple[tuple[float, int], ...]
    """(seconds, prompt tokens) of each request."""
    ttft_target_s: float
    """A request counts as good if its first token comes within this time."""

    @property
    def seconds(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.arrivals[-1][0] - self.arrivals[0][0]

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens per second."""
        return sum(num_tokens for _, num_tokens in self.arrivals) / self.seconds


def short_prompt(rng: random.Random) -> int:
    """Return the tokens of a short prompt: log-normal, median 33, mean 42, from 4 to 512."""
    return min(512, max(4, int(rng.lognormvariate(3.5, 0.7))))


def medium_prompt(rng: random.Random) -> int:
    """Return the tokens of a medium prompt: from 16 to 240 alike, mean 128."""
    return rng.randint(16, 240)


def poisson(rate: float, *, seconds: float, seed: int, medium: bool = False) -> Load:
    """Return a load of independent arrivals, `rate` a second."""
    rng = random.Random(seed)
    now, arrivals = 0.0, []
    while (now := now + rng.expovariate(rate)) < seconds:
        arrivals.append((now, medium_prompt(rng) if medium else short_prompt(rng)))
    name = f"Poisson {rate:g}/s, {'medium' if medium else 'short'} prompts"
    return Load(name=name, arrivals=tuple(arrivals), ttft_target_s=0.05)


def fan_outs(rate: float, *, seconds: float, seed: int, size: int = 8, spread_s: float = 0.003) -> Load:
    """Return a load of `rate` requests a second that come `size` together within `spread_s`, as from agents."""
    rng = random.Random(seed)
    now, arrivals = 0.0, []
    while (now := now + rng.expovariate(rate / size)) < seconds:
        arrivals += [(now + rng.uniform(0, spread_s), short_prompt(rng)) for _ in range(size)]
    name = f"fan-outs of {size}, {rate:g}/s, short prompts"
    return Load(name=name, arrivals=tuple(sorted(arrivals)), ttft_target_s=0.05)


def azure_code(speed: float) -> Load | None:
    """Return the Azure code trace of 2023, played `speed` times as fast; None if the file is not there."""
    if not AZURE_CODE_TRACE.exists():
        return None
    with gzip.open(AZURE_CODE_TRACE, "rt") as file:
        rows = [
            (datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp(), int(row["ContextTokens"]))
            for row in csv.DictReader(file)
        ]
    start = rows[0][0]
    arrivals = tuple(((time - start) / speed, num_tokens) for time, num_tokens in rows)
    return Load(name=f"Azure code trace, {speed:g}x", arrivals=arrivals, ttft_target_s=1.0)
