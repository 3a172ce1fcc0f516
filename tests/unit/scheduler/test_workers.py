"""Which workers should share a host."""

from __future__ import annotations

import pytest

from scheduler.workers import group_workers


@pytest.mark.parametrize(
    ("num_prefill", "num_decode", "expected"),
    [
        (1, 1, [["decode-0", "prefill-0"]]),
        (2, 2, [["decode-0", "prefill-0"], ["decode-1", "prefill-1"]]),
        (1, 3, [["decode-0", "decode-1", "decode-2", "prefill-0"]]),
        (3, 2, [["decode-0", "prefill-0", "prefill-2"], ["decode-1", "prefill-1"]]),
    ],
)
def test_each_group_has_both_kinds_and_each_worker_is_in_one(
    num_prefill: int, num_decode: int, expected: list[list[str]]
) -> None:
    assert group_workers(num_prefill, num_decode) == expected
