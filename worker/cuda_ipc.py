"""Device memory of one process, opened in another process on the same host (CUDA IPC)."""

from __future__ import annotations

import base64
import json
from typing import Any

import torch

_BYTES = ("storage_handle", "ref_counter_handle", "event_handle")
_NUMBERS = ("size_bytes", "offset_bytes", "ref_counter_offset", "event_sync_required")


def share(tensor: torch.Tensor) -> str:
    """Return a text by which another process can `open_shared` the whole storage of a contiguous CUDA tensor.

    The tensor must live as long as anyone has it open.
    """
    (
        _,
        storage_handle,
        size_bytes,
        offset_bytes,
        ref_counter_handle,
        ref_counter_offset,
        event_handle,
        event_sync_required,
    ) = tensor.untyped_storage()._share_cuda_()
    shared: dict[str, Any] = {
        "size_bytes": size_bytes,
        "offset_bytes": offset_bytes,
        "ref_counter_offset": ref_counter_offset,
        "event_sync_required": event_sync_required,
    }
    for name, value in zip(_BYTES, (storage_handle, ref_counter_handle, event_handle), strict=True):
        shared[name] = base64.b64encode(value).decode()
    return json.dumps(shared)


def open_shared(text: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Open what `share` has shared, as one dimension, on this process's `device`.

    That is the same GPU, or one that can reach the other's memory. Raises `RuntimeError` if it cannot.
    """
    shared = json.loads(text)
    torch.cuda.init()
    handles = {name: base64.b64decode(shared[name]) for name in _BYTES}
    numbers = {name: shared[name] for name in _NUMBERS}
    index = torch.cuda.current_device() if device.index is None else device.index
    storage = torch.UntypedStorage._new_shared_cuda(
        index,
        handles["storage_handle"],
        numbers["size_bytes"],
        numbers["offset_bytes"],
        handles["ref_counter_handle"],
        numbers["ref_counter_offset"],
        handles["event_handle"],
        numbers["event_sync_required"],
    )
    return torch.empty(0, dtype=dtype, device=torch.device("cuda", index)).set_(storage)
