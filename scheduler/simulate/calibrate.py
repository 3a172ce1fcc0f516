"""What a service that is idle takes, asked as a client asks: the parts of a cost model that its start cannot measure.

What workers measure when they warm up, they measure at the same time, without messages, and without what lies around
a computation. Here one thing is measured after the other, over the way that every request goes, from times that the
answers carry (`return_timings`) and from when tokens come. Prompts are random, so that none is known from another.
"""

from __future__ import annotations

import http.client
import json
import random
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from scheduler.errors import ConfigError

USER = "purefill-calibration"
"""What its requests are known by, so that a log of requests can leave them out."""
_TIMEOUT_S = 120.0
_REPETITIONS = 3
_STEPS = 12
"""Tokens of an answer from which the time of a step is taken."""
_LONG_TOKENS = 1024
"""Of the prompt by which the cost of context is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A streamed answer, in seconds of one clock."""

    sent_s: float
    token_at_s: Mapping[int, Sequence[float]]
    """When each choice's tokens came."""
    timings: Sequence[Mapping[str, float]]
    """Of each choice, as the service told them."""

    @property
    def first_token_s(self) -> float:
        """From sending the request to the first token of any choice."""
        return min(times[0] for times in self.token_at_s.values()) - self.sent_s

    @property
    def prefill_s(self) -> float:
        """The prefill of its batch, or of the longest if there were several."""
        return max(timing["prefill_s"] for timing in self.timings)

    @property
    def around_s(self) -> float:
        """What HTTP, tokenising and messages took of the time to its first token."""
        first = self.timings[0]
        return max(0.0, self.first_token_s - first["queued_s"] - first["held_s"] - first["prefill_s"])

    @property
    def gaps_s(self) -> list[float]:
        """Between one token and the next of the same choice, the first gap of each left out."""
        return [b - a for times in self.token_at_s.values() for a, b in pairwise(times[1:])]

    @property
    def first_gaps_s(self) -> list[float]:
        """Between the first and the second token of each choice."""
        return [times[1] - times[0] for times in self.token_at_s.values() if len(times) > 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was measured. Seconds, of one request at a time unless said otherwise."""

    prefill_seconds: Mapping[int, float]
    """By tokens, in as many prompts as a batch may have."""
    step_seconds: Mapping[int, float]
    """By sequences."""
    seconds_per_context_token: float
    attention_seconds_per_pair: float
    """What each pair of a prompt's tokens adds to a prefill."""
    around_s: float
    """HTTP, tokenising and messages on the way to a first token."""
    start_s: float
    """How much longer than a step it takes from a first token to the second."""


Ask = Callable[[int, int, int], Answer]
"""Send a request: so many prompts, of so many tokens each, with answers of so many tokens."""


def calibrate(
    ask: Ask,
    *,
    prefill_tokens: Sequence[int],
    max_slots: int,
    step_sizes: Sequence[int],
    max_model_len: int,
) -> Calibration:
    """Measure what an idle service takes.

    `prefill_tokens` are its token buckets and `step_sizes` those of decode steps that one batch fills, both ascending.
    """
    ask(1, 4, 4)  # whatever the first request costs besides
    prefill: dict[int, float] = {}
    for num_tokens in prefill_tokens:
        slots = min(max_slots, num_tokens)
        if num_tokens // slots + 3 <= max_model_len:
            prefill[num_tokens] = _prefill_s(ask, slots, num_tokens // slots)
    around = [ask(1, 4, 3).around_s for _ in range(2 * _REPETITIONS)]
    steps: dict[int, float] = {}
    starts: list[float] = []
    for size in step_sizes:
        answers = [ask(size, 4, _STEPS) for _ in range(_REPETITIONS)]
        steps[size] = median(gap for answer in answers for gap in answer.gaps_s)
        starts += [gap - steps[size] for answer in answers for gap in answer.first_gaps_s]
    long = min(_LONG_TOKENS, max_model_len - _STEPS)
    with_context = median(ask(1, long, _STEPS).gaps_s)
    return Calibration(
        prefill_seconds=prefill,
        step_seconds=steps,
        seconds_per_context_token=max(0.0, (with_context - steps[step_sizes[0]]) / long),
        attention_seconds_per_pair=_pair_s(ask, prefill, max_slots, max_model_len),
        around_s=median(around),
        start_s=max(0.0, median(starts)),
    )


def _prefill_s(ask: Ask, num_prompts: int, num_tokens: int) -> float:
    """Return what a batch of prompts takes. A few tokens are decoded after each, as in life: they cool the caches."""
    return median(ask(num_prompts, num_tokens, 3).prefill_s for _ in range(_REPETITIONS))


def _pair_s(ask: Ask, prefill: Mapping[int, float], max_slots: int, max_model_len: int) -> float:
    """Return what a pair of tokens costs: one prompt has more of them than several of as many tokens together."""
    sizes = [size for size in prefill if size + 3 <= max_model_len]
    if not sizes or max_slots < 2:
        return 0.0
    num_tokens = max(sizes)
    more_s = _prefill_s(ask, 1, num_tokens) - prefill[num_tokens]
    return max(0.0, more_s / (num_tokens * num_tokens / 2 * (1 - 1 / max_slots)))


class Client:
    """Asks a service for completions of random prompts."""

    def __init__(self, url: str, *, model: str, vocab_size: int, api_key: str | None) -> None:
        self._address = urlsplit(url)
        self._model = model
        self._vocab_size = vocab_size
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._rng = random.Random(0)

    def ask(self, num_prompts: int, num_tokens: int, max_tokens: int) -> Answer:
        """Send a request and follow its answer. Raises `ConfigError` if there is none."""
        body = {
            "model": self._model,
            "prompt": [
                [self._rng.randrange(self._vocab_size) for _ in range(num_tokens)] for _ in range(num_prompts)
            ],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "return_timings": True,
            "return_token_ids": True,
            "user": USER,
        }
        with closing(self._connection()) as connection:
            sent_s = time.perf_counter()
            try:
                connection.request("POST", "/v1/completions", json.dumps(body), self._headers)
                answer = connection.getresponse()
                if answer.status != 200:
                    raise ConfigError(f"write_cost_model: the service answers {answer.status}")
                return _followed(answer, sent_s)
            except (OSError, http.client.HTTPException) as error:
                raise ConfigError(f"write_cost_model: the service does not answer: {error}") from error

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._address.hostname or "", self._address.port
        if self._address.scheme == "https":
            # It is this process's own service, whatever its certificate says of its name.
            own = ssl._create_unverified_context()
            return http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=own)
        return http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)


def _followed(answer: http.client.HTTPResponse, sent_s: float) -> Answer:
    token_at_s: dict[int, list[float]] = {}
    timings: dict[int, Mapping[str, float]] = {}
    for line in answer:
        if not line.startswith(b"data:") or line.startswith(b"data: [DONE]"):
            continue
        now = time.perf_counter()
        chunk: Any = json.loads(line[5:])
        if "error" in chunk:
            raise ConfigError(f"write_cost_model: the service answers {chunk['error']['message']}")
        for choice in chunk["choices"]:
            token_at_s.setdefault(choice["index"], []).extend([now] * len(choice["token_ids"]))
            if "timings" in choice:
                timings[choice["index"]] = choice["timings"]
    return Answer(sent_s=sent_s, token_at_s=token_at_s, timings=[timings[i] for i in sorted(timings)])
