"""Real prompts and traces from the folder beside the repository; tests skip where it is absent."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2].parent / "shared"


def shared_file(*parts: str) -> Path:
    """Return a file of ../shared, or skip the test if it is not there."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"../shared/{'/'.join(parts)} is not there")
    return path


def mt_bench_prompts() -> list[str]:
    """Return the first turns of all 80 MT-bench questions."""
    lines = shared_file("data", "mt_bench_question.jsonl").read_text().splitlines()
    return [json.loads(line)["turns"][0] for line in lines]


def human_eval_prompts(count: int) -> list[str]:
    """Return the first `count` HumanEval prompts."""
    with gzip.open(shared_file("data", "HumanEval.jsonl.gz"), "rt") as file:
        return [json.loads(line)["prompt"] for line in file][:count]
