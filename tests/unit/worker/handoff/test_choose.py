"""Which transport it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.errors import ConfigError
from scheduler.messages import PoolHandle
from worker.handoff.choose import choose_transport

HANDLE = PoolHandle(
    decode_worker="decode-0",
    transport="shm",
    address="",
    incarnation=1,
    num_pages=2,
    page_size=4,
    size_bytes=1,
    node_id="a",
    endpoint="10.0.0.1:9",
)
ON_GPU = replace(HANDLE, transport="cuda_ipc", device_type="cuda")


@pytest.mark.parametrize(
    ("handle", "node_id", "wanted", "expected"),
    [
        (HANDLE, "a", "auto", "shm"),
        (HANDLE, "b", "auto", "gloo"),
        (HANDLE, "a", "gloo", "gloo"),
        (ON_GPU, "a", "auto", "cuda_ipc"),
        (ON_GPU, "b", "auto", "nccl"),
        (ON_GPU, "a", "nccl", "nccl"),
    ],
)
def test_where_the_two_live_decides_unless_told_otherwise(
    handle: PoolHandle, node_id: str, wanted: str, expected: str
) -> None:
    chosen = choose_transport(handle, node_id=node_id, device_type=handle.device_type, wanted=wanted)
    assert chosen == expected


@pytest.mark.parametrize(
    ("handle", "node_id", "device_type", "wanted", "message"),
    [
        (
            HANDLE,
            "b",
            "cpu",
            "shm",
            "handoff_transport must be auto or gloo, decode-0 is on another host, got shm",
        ),
        (HANDLE, "a", "cpu", "nccl", "handoff_transport must be auto, shm or gloo on cpu, got nccl"),
        (ON_GPU, "a", "cpu", "auto", "device must be the same for prefill and decode"),
        (replace(HANDLE, endpoint=""), "b", "cpu", "auto", "decode-0 takes no pages from other hosts"),
    ],
)
def test_what_cannot_be_is_refused(
    handle: PoolHandle, node_id: str, device_type: str, wanted: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_transport(handle, node_id=node_id, device_type=device_type, wanted=wanted)
