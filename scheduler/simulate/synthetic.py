"""Synthetic loads, named by a line such as ``poisson:rate=50,requests=10000,prompt=1024,output=128``."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from math import exp, inf, log

from scheduler.errors import ConfigError
from scheduler.simulate.traces import Arrival

KINDS = ("poisson", "gamma", "onoff")


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticLoad:
    """Independent arrivals and lengths. The same seed makes the same load."""

    kind: str
    rate: float = 10.0
    """Requests a second on average; with ``onoff`` while it is on."""
    requests: int = 1000
    cv: float = 3.0
    """``gamma``: coefficient of variation of the gaps; 1 is Poisson, more is burstier."""
    on: float = 1.0
    """``onoff``: seconds for which requests come, exponentially distributed."""
    off: float = 4.0
    """``onoff``: seconds of silence between, exponentially distributed."""
    prompt: int = 512
    """Mean tokens of a prompt."""
    prompt_sigma: float = 0.7
    """Of the log-normal distribution of prompts; 0: all are alike."""
    output: int = 128
    """Mean tokens of an answer."""
    output_sigma: float = 0.7

    def arrivals(self, seed: int) -> Iterator[Arrival]:
        """Yield the load."""
        rng = random.Random(seed)
        gaps = {"poisson": self._poisson, "gamma": self._gamma, "onoff": self._on_off}[self.kind](rng)
        now = 0.0
        for _ in range(self.requests):
            now += next(gaps)
            prompt = _length(rng, self.prompt, self.prompt_sigma)
            yield Arrival(now, prompt, _length(rng, self.output, self.output_sigma))

    def _poisson(self, rng: random.Random) -> Iterator[float]:
        while True:
            yield rng.expovariate(self.rate)

    def _gamma(self, rng: random.Random) -> Iterator[float]:
        shape = 1 / self.cv**2
        while True:
            yield rng.gammavariate(shape, 1 / (self.rate * shape))

    def _on_off(self, rng: random.Random) -> Iterator[float]:
        left = rng.expovariate(1 / self.on)
        while True:
            gap = silence = rng.expovariate(self.rate)
            while silence > left:
                pause = rng.expovariate(1 / self.off)
                gap += pause
                silence -= left
                left = rng.expovariate(1 / self.on)
            left -= silence
            yield gap


def parse_load(text: str) -> SyntheticLoad:
    """Read such a line. Raises `ConfigError` naming what is wrong."""
    kind, _, rest = text.partition(":")
    load = SyntheticLoad(kind=kind)
    types = {f.name: type(getattr(load, f.name)) for f in fields(load) if f.name != "kind"}
    values: dict[str, int | float] = {}
    for part in filter(None, rest.split(",")):
        name, _, value = part.partition("=")
        if name not in types:
            raise ConfigError(f"{kind}: unknown setting {name}; known are {', '.join(types)}")
        try:
            values[name] = types[name](value)
        except ValueError:
            raise ConfigError(f"{kind}: {name} must be a number, got {value!r}") from None
        low = 0 if name.endswith("sigma") else 1 if types[name] is int else None
        if not (values[name] > 0 if low is None else values[name] >= low) or values[name] == inf:
            raise ConfigError(f"{kind}: {name} must be {'> 0' if low is None else f'>= {low}'}, got {value}")
    return replace(load, **values)  # type: ignore[arg-type]


def _length(rng: random.Random, mean: int, sigma: float) -> int:
    if not sigma:
        return mean
    return max(1, round(exp(rng.gauss(log(mean) - sigma * sigma / 2, sigma))))
