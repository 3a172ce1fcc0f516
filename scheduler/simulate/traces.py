"""Request traces: when requests came, how long their prompts were, and how long the answers.

Read line by line, so that a trace of any length costs no memory. A file may be compressed (``.gz``).
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, islice
from math import isfinite
from pathlib import Path
from typing import IO, NamedTuple

from scheduler.errors import ConfigError


class Arrival(NamedTuple):
    """One request of a trace."""

    time_s: float
    """Since the trace began."""
    num_prompt: int
    """Prompt tokens, >= 1."""
    num_output: int
    """Answer tokens, >= 1."""
    hash_ids: tuple[int, ...] = ()
    """Of each `TRACE_BLOCK_TOKENS` tokens of the prompt, if known: equal where they and all before them are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Format:
    time: str
    prompt: str
    output: str
    seconds: Callable[[str], float]


_YEAR = datetime(2023, 1, 1)


def _azure_seconds(text: str) -> float:
    # Seven decimals; datetime knows six.
    return (datetime.fromisoformat(text[:26]) - _YEAR).total_seconds()


TRACE_COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")
"""Of the trace that a service writes (`scheduler.request_trace`): seconds since 1970, and tokens."""
_FORMATS = {
    "azure": _Format(
        time="TIMESTAMP", prompt="ContextTokens", output="GeneratedTokens", seconds=_azure_seconds
    ),
    "burstgpt": _Format(time="Timestamp", prompt="Request tokens", output="Response tokens", seconds=float),
    "purefill": _Format(
        time=TRACE_COLUMNS[0], prompt=TRACE_COLUMNS[1], output=TRACE_COLUMNS[2], seconds=float
    ),
}
TRACE_BLOCK_TOKENS = 512
"""Tokens that an id of Mooncake stands for."""
_MOONCAKE = ("timestamp", "input_length", "output_length")
"""Keys of each line's JSON object; the timestamp is in milliseconds."""


def read_trace(path: Path) -> Iterator[Arrival]:
    """Yield the requests of a trace in the format of Azure, BurstGPT, Mooncake, or our own.

    Times count from the first request. An answer of 0 tokens, as BurstGPT has it for failures, counts as 1 token.
    Raises `ConfigError`, naming the line, for what is not in order.
    """
    try:
        with _opened(path) as file:
            first = file.readline()
            if not first.strip():
                raise ConfigError(f"trace {path} is empty")
            rows = (
                _mooncake(path, chain((first,), file))
                if first.lstrip()[0] == "{"
                else _table(path, first, file)
            )
            start: float | None = None
            last = 0.0
            for line, time_s, num_prompt, num_output, hash_ids in rows:
                start = time_s if start is None else start
                if time_s - start < last:
                    raise ConfigError(
                        f"{path}, line {line}: times must not go back, got {time_s - start:g} s after {last:g} s"
                    )
                last = time_s - start
                if num_prompt < 1:
                    raise ConfigError(f"{path}, line {line}: prompt tokens must be >= 1, got {num_prompt}")
                if num_output < 0:
                    raise ConfigError(f"{path}, line {line}: answer tokens must be >= 0, got {num_output}")
                yield Arrival(last, num_prompt, num_output or 1, hash_ids)
            if start is None:
                raise ConfigError(f"trace {path} holds no request")
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise ConfigError(f"trace {path} cannot be read: {error}") from error


def played(
    make: Callable[[], Iterator[Arrival]], *, speed_up: float = 1.0, repeat: int = 1, limit: int | None = None
) -> Iterator[Arrival]:
    """Play a trace `speed_up` times as fast, `repeat` times in a row, and no more than `limit` requests of it."""

    def all_of_them() -> Iterator[Arrival]:
        begins_at = 0.0
        for _ in range(repeat):
            last, count = 0.0, 0
            for arrival in make():
                last, count = arrival.time_s, count + 1
                yield arrival._replace(time_s=begins_at + last / speed_up)
            # One mean gap lies between the last request and the first of the next round.
            begins_at += (last + last / max(1, count - 1)) / speed_up

    return islice(all_of_them(), limit)


def _opened(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


_Row = tuple[int, float, int, int, tuple[int, ...]]


def _table(path: Path, header: str, file: Iterable[str]) -> Iterator[_Row]:
    """Yield line, seconds, prompt and answer tokens of each row of a CSV."""
    columns = next(csv.reader([header.removeprefix("\ufeff")]))
    for form in _FORMATS.values():
        if form.time in columns:
            break
    else:
        known = ", ".join(f"{f.time},{f.prompt},{f.output}" for f in _FORMATS.values())
        raise ConfigError(
            f"{path}, line 1: unknown columns {','.join(columns)}; known are {known}, and Mooncake's JSON"
        )
    for name in (form.prompt, form.output):
        if name not in columns:
            raise ConfigError(f"{path}, line 1: column {name} is missing, got {','.join(columns)}")
    time_at, prompt_at, output_at = (columns.index(name) for name in (form.time, form.prompt, form.output))
    for line, row in enumerate(csv.reader(file), start=2):
        if not row:
            continue
        try:
            yield line, _finite(form.seconds(row[time_at])), int(row[prompt_at]), int(row[output_at]), ()
        except (ValueError, IndexError) as error:
            raise ConfigError(f"{path}, line {line}: {error}") from error


def _mooncake(path: Path, file: Iterable[str]) -> Iterator[_Row]:
    for line, text in enumerate(file, start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{path}, line {line}: not JSON: {error}") from error
        values: list[float] = []
        for key in _MOONCAKE:
            value = row.get(key) if isinstance(row, Mapping) else None
            if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
                raise ConfigError(f"{path}, line {line}: {key} must be a number, got {value!r}")
            values.append(value)
        ids = row.get("hash_ids", ())
        if not isinstance(ids, list | tuple) or not all(type(i) is int and 0 <= i < 2**63 for i in ids):
            raise ConfigError(
                f"{path}, line {line}: hash_ids must be a list of integers >= 0, got {ids!r:.50}"
            )
        yield line, values[0] / 1000, int(values[1]), int(values[2]), tuple(ids)


def _finite(value: float) -> float:
    if not isfinite(value):
        raise ValueError(f"time must be a finite number, got {value}")
    return value
