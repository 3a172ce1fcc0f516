"""Which transport brings a prefill worker's pages to a decode worker."""

from __future__ import annotations

from scheduler.errors import ConfigError
from scheduler.messages import PoolHandle

_DIRECT = {"cpu": "shm", "cuda": "cuda_ipc"}
_BY_MESSAGE = {"cpu": "gloo", "cuda": "nccl"}


def choose_transport(handle: PoolHandle, *, node_id: str, device_type: str, wanted: str) -> str:
    """Return the transport from a worker on a node and a kind of device to a pool: ``auto``, or the one wanted.

    On one host prefill writes into the pool itself; to another host the pages are sent. Raises `ConfigError` if the
    two cannot meet.
    """
    if handle.device_type != device_type:
        raise ConfigError(
            f"device must be the same for prefill and decode: the pages of {handle.decode_worker} are on "
            f"{handle.device_type}, and this worker is on {device_type}"
        )
    direct, by_message = _DIRECT[device_type], _BY_MESSAGE[device_type]
    same_node = handle.node_id == node_id
    transport = wanted if wanted != "auto" else direct if same_node else by_message
    if transport not in (direct, by_message):
        raise ConfigError(
            f"handoff_transport must be auto, {direct} or {by_message} on {device_type}, got {transport}"
        )
    if transport == direct and not same_node:
        raise ConfigError(
            f"handoff_transport must be auto or {by_message}, {handle.decode_worker} is on another host, got {direct}"
        )
    if transport == by_message and not handle.endpoint:
        raise ConfigError(
            f"{handle.decode_worker} takes no pages from other hosts: it was started for one host"
        )
    return transport
