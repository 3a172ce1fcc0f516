"""Bytes that are nearly HTTP, sent to the real service. `benchmarks/fuzz.py` does the same for minutes."""

from __future__ import annotations

import asyncio

from benchmarks.fuzz import Fuzzer
from tests.support.service import Service


def test_no_bytes_break_the_service_or_stay_in_it(service: Service) -> None:
    """No 5xx, no leak, no crash; valid requests in between are answered with the same tokens."""
    num_lines = len(service.log)
    found = asyncio.run(Fuzzer(service, seed=6).run(num_cases=300, seconds=60))
    assert found.failures == []
    assert found.num_cases == 300
    # Most of it must get as far as to be understood.
    assert found.statuses[200] > 30
    assert found.statuses[400] > 30
    assert [line for line in service.log[num_lines:] if "Traceback" in line] == []
