"""`purefill status`: what a running service and its actors do, for people and for scripts."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

READY, NOT_READY, UNREACHABLE = 0, 1, 3
"""Exit codes. 2 is for a wrong command line."""

_TIMEOUT_S = 15.0
"""Longer than an ApiServer waits for the scheduler's answer."""


def print_status(url: str, *, as_json: bool) -> int:
    """Print what the service at `url` does, and return the exit code."""
    status = fetch_status(url)
    print(json.dumps(status) if as_json else describe(status))
    if "actors" not in status:
        return UNREACHABLE if status["unreachable"] else NOT_READY
    return READY if status["ready"] else NOT_READY


def fetch_status(url: str) -> dict[str, Any]:
    """Return what ``GET /status`` answers. Without an answer, only ``ready``, ``problem`` and ``unreachable``."""
    unreachable = True
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/status", timeout=_TIMEOUT_S) as answer:
            status: dict[str, Any] = json.load(answer)
            return status
    except urllib.error.HTTPError as error:
        # An ApiServer that has lost the scheduler answers with OpenAI's error body.
        unreachable = error.code != 503
        problem = json.load(error)["error"]["message"] if not unreachable else f"{url} answers {error.code}"
    except (OSError, ValueError) as error:
        problem = f"{url} does not answer: {getattr(error, 'reason', error)}"
    return {"ready": False, "problem": problem, "unreachable": unreachable}


def describe(status: Mapping[str, Any]) -> str:
    """Return the status as a few lines of text."""
    verdict = "ready" if status["ready"] else f"not ready: {status['problem']}"
    if "actors" not in status:
        return verdict
    lines = [
        f"purefill {status['version']} serves {status['model']}: {verdict}",
        f"{status['live_requests']} requests run, {status['queue_requests']} of them wait "
        f"with {status['queue_tokens']} tokens",
        "",
        f"{'ACTOR':<14}{'POOL':<11}{'STATE':<10}SINCE",
    ]
    for actor in status["actors"]:
        since = datetime.fromtimestamp(actor["start_time"], UTC).isoformat(sep=" ", timespec="seconds")
        lines.append(f"{actor['name']:<14}{actor['pool']:<11}{actor['state']:<10}{since}")
    return "\n".join(lines)
