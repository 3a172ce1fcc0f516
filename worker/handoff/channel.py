"""What a prefill and a decode worker on different hosts say to each other.

The decode worker's `Endpoint` is a store of torch.distributed. A prefill worker puts its name there, and both make a
process group of two. Then, for each writing, the prefill worker sends a `Manifest` and the content of the pages in a
few large messages, and the decode worker answers, for each lease, whether it was taken.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed

from scheduler.errors import HandoffError
from scheduler.messages import Lease

distributed: Any = torch.distributed  # of what is used here, torch's types know hardly anything
PREFILL_RANK, DECODE_RANK = 0, 1
_CONNECT_TIMEOUT = timedelta(seconds=3)
"""An endpoint that is there answers at once; torch would go on trying where there is none."""
_MEET_TIMEOUT = timedelta(seconds=20)
_TIMEOUT = timedelta(seconds=30)
"""A peer that is silent for so long, in the middle of a writing, counts as dead."""
_NEVER = timedelta(days=365)
_MESSAGE_BYTES = 32 << 20
"""Content is sent in messages of about this size: large enough that their number costs nothing."""
_COUNT_KEY = "num_peers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What comes: leases, and of each how many pages have content."""

    leases: Sequence[Lease]
    num_written: Sequence[int]

    def targets(self) -> tuple[list[int], list[int]]:
        """Return all pages with content, and the epoch of each."""
        pages: list[int] = []
        epochs: list[int] = []
        for lease, count in zip(self.leases, self.num_written, strict=True):
            pages += lease.page_ids[:count]
            epochs += [lease.epoch] * count
        return pages, epochs

    def encode(self) -> torch.Tensor:
        """Return it as int64: for each lease epoch, pages and pages with content; then all page ids."""
        numbers: list[int] = []
        for lease, count in zip(self.leases, self.num_written, strict=True):
            numbers += (lease.epoch, len(lease.page_ids), count)
        for lease in self.leases:
            numbers += lease.page_ids
        return torch.from_numpy(np.array(numbers, dtype=np.int64))

    @classmethod
    def decode(cls, numbers: Sequence[int], num_leases: int, decode_worker: str) -> Manifest:
        """Read what `encode` made."""
        leases: list[Lease] = []
        num_written: list[int] = []
        start = 3 * num_leases
        for i in range(num_leases):
            epoch, num_pages, count = numbers[3 * i : 3 * i + 3]
            page_ids = tuple(numbers[start : start + num_pages])
            leases.append(Lease(decode_worker=decode_worker, epoch=epoch, page_ids=page_ids))
            num_written.append(count)
            start += num_pages
        return cls(leases=leases, num_written=num_written)


def message_pages(num_pages: int, page_bytes: int) -> Iterator[slice]:
    """Cut so many pages into messages; both sides do it alike."""
    size = max(1, _MESSAGE_BYTES // page_bytes)
    for start in range(0, num_pages, size):
        yield slice(start, min(start + size, num_pages))


class Channel:
    """One connection of two workers, as one of them sees it. All methods raise `HandoffError` if it is broken."""

    def __init__(self, endpoint: str, *, number: int, rank: int, device: torch.device) -> None:
        """Meet the other side at an endpoint, as its peer `number`."""
        self._peer = 1 - rank
        self._device = device
        own_host = _own_host(endpoint)
        try:
            store = distributed.PrefixStore(f"peer {number}", _open_store(endpoint))
            options = distributed.ProcessGroupGloo._Options()
            options._devices = [distributed.ProcessGroupGloo.create_device(hostname=own_host)]
            options._timeout = _MEET_TIMEOUT
            self._control = distributed.ProcessGroupGloo(store, rank, 2, options)
            self._data = self._control
            if device.type == "cuda":
                nccl = distributed.ProcessGroupNCCL.Options()
                nccl._timeout = _TIMEOUT
                data_store = distributed.PrefixStore("data", store)
                self._data = distributed.ProcessGroupNCCL(data_store, rank, 2, nccl)
        except RuntimeError as error:
            raise HandoffError(f"no connection to {endpoint}: {_first_line(error)}") from error

    def send(self, *numbers: int) -> None:
        """Send a few numbers."""
        self.send_numbers(torch.tensor(numbers, dtype=torch.int64))

    def send_numbers(self, numbers: torch.Tensor) -> None:
        """Send numbers of int64 of which the other side knows how many they are."""
        _finish(self._control.send, numbers, self._peer)

    def receive(self, count: int, *, is_first: bool = False) -> list[int]:
        """Wait for `count` numbers: the first of a writing for as long as it takes."""
        numbers = torch.empty(count, dtype=torch.int64)
        _finish(self._control.recv, numbers, self._peer, _NEVER if is_first else _TIMEOUT)
        values: list[int] = numbers.tolist()
        return values

    def send_content(self, content: torch.Tensor) -> None:
        """Send the content of pages."""
        _finish(self._data.send, content.view(torch.uint8), self._peer)

    def receive_content(self, num_bytes: int) -> torch.Tensor:
        """Wait for the content of pages; return it as bytes on this side's device."""
        content = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        _finish(self._data.recv, content, self._peer)
        return content


class Endpoint:
    """The place where prefill workers of other hosts find a decode worker."""

    def __init__(self, host: str) -> None:
        """Listen on one address of this host, at any free port."""
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        self.address = f"{host}:{port}"
        # Given a socket of ours, torch listens on that address only.
        self._server = distributed.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        # One that waits is busy, so the server's own connection is not used for that.
        self._waiting = _open_store(self.address)
        self._waiting.set_timeout(_NEVER)

    def next_peer(self, number: int) -> None:
        """Wait for prefill worker `number`, counted from 1."""
        self._waiting.wait([f"peer {number} comes"])


def join(endpoint: str, device: torch.device) -> Channel:
    """Connect to a decode worker. Raises `HandoffError` if it cannot be reached."""
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT.total_seconds()).close()
        store = _open_store(endpoint)
        number = store.add(_COUNT_KEY, 1)
        store.set(f"peer {number} comes", "")
    except (OSError, RuntimeError) as error:
        raise HandoffError(f"no connection to {endpoint}: {_first_line(error)}") from error
    return Channel(endpoint, number=number, rank=PREFILL_RANK, device=device)


def _finish(transfer: Any, tensor: torch.Tensor, peer: int, timeout: timedelta = _TIMEOUT) -> None:
    """Send or receive a tensor, and wait for it. Raises `HandoffError` if the connection is broken."""
    try:
        transfer([tensor], peer, 0).wait(timeout)
    except RuntimeError as error:
        raise HandoffError(f"the connection is broken: {_first_line(error)}") from error


def _open_store(endpoint: str) -> Any:
    host, _, port = endpoint.rpartition(":")
    store = distributed.TCPStore(host, int(port), is_master=False, timeout=_CONNECT_TIMEOUT)
    store.set_timeout(_MEET_TIMEOUT)
    return store


def _own_host(endpoint: str) -> str:
    """Return the address by which this host reaches an endpoint."""
    host, _, port = endpoint.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        address: str = probe.getsockname()[0]
        return address


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
