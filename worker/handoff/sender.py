"""Handoff by messages, prefill side (``gloo`` between CPU hosts, ``nccl`` between GPUs)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from scheduler.errors import HandoffError, StaleLeaseError
from scheduler.messages import Lease
from worker.handoff.base import Arrival, Writing
from worker.handoff.channel import Channel, Manifest, join, message_pages
from worker.kv_pool import KVPool

_LOG = logging.getLogger(__name__)


class Staging:
    """Owns the pages that a prefill worker fills for decode workers on other hosts. For several threads."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self._free = list(range(pool.num_pages - 1, 0, -1))
        self._freed = threading.Condition()

    @property
    def num_pages(self) -> int:
        """Pages that can be taken: all but the scratch page 0."""
        return self.pool.num_pages - 1

    def take(self, num_pages: int) -> list[int]:
        """Return free pages; wait until there are so many."""
        with self._freed:
            self._freed.wait_for(lambda: len(self._free) >= num_pages)
            return [self._free.pop() for _ in range(num_pages)]

    def give_back(self, page_ids: Sequence[int]) -> None:
        """Free pages whose content is not needed any more."""
        with self._freed:
            self._free.extend(page_ids)
            self._freed.notify_all()


class SendHandoff:
    """Owns the connection to one decode worker, and a thread that sends while the next batch is computed."""

    def __init__(self, endpoint: str, staging: Staging) -> None:
        """Raises `HandoffError` if the decode worker cannot be reached."""
        self._endpoint = endpoint
        self._staging = staging
        self.pool = staging.pool
        self.transport = "gloo" if self.pool.device.type == "cpu" else "nccl"
        self.max_pages = staging.num_pages
        self._channel: Channel | None = join(endpoint, self.pool.device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="handoff")
        self._is_closed = False

    def begin(self, leases: Sequence[Lease], num_tokens: Sequence[int]) -> Writing:
        """Take pages of our own; wait until there are enough. Whether a lease is stale shows at the other end.

        Cached KV is at the other end too, so all tokens are computed here.
        """
        counts = [-(-count // self.pool.page_size) for count in num_tokens]
        pages = self._staging.take(sum(counts))
        page_ids: list[list[int]] = []
        for count in counts:
            page_ids.append(pages[:count])
            del pages[:count]
        return Writing(leases=leases, page_ids=page_ids, refused={})

    def finish(self, writing: Writing) -> Future[Arrival]:
        """Send it in the background, after what was finished before."""
        return self._thread.submit(self._hand_over, writing)

    def close(self) -> None:
        """Forget the connection once the writing under way has been sent or has failed. Those behind it fail."""
        self._is_closed = True
        # They are not cancelled: each gives its pages back, and somebody waits for what became of it.
        self._thread.shutdown(wait=False)

    def _hand_over(self, writing: Writing) -> Arrival:
        started = time.perf_counter()
        all_pages = [page for page_ids in writing.page_ids for page in page_ids]
        pages = [page for page_ids in writing.own_page_ids for page in page_ids]
        errors: dict[int, StaleLeaseError | HandoffError] = {}
        try:
            if writing.leases:
                errors.update(self._send_somehow(writing, pages))
        except HandoffError as error:
            errors.update(dict.fromkeys(range(len(writing.leases)), error))
        finally:
            self._staging.give_back(all_pages)
        return Arrival(
            errors=errors,
            num_bytes=writing.num_arrived(errors) * self.pool.page_bytes,
            seconds=time.perf_counter() - started,
        )

    def _send_somehow(self, writing: Writing, pages: Sequence[int]) -> dict[int, StaleLeaseError]:
        """Send the pages, and return the leases that were refused.

        A connection that was used before may have broken since: all is sent again over a new one then. What arrives
        twice is the same.
        """
        channel, self._channel = self._channel, None
        if channel is not None and not self._is_closed:
            try:
                refused = self._send(channel, writing, pages)
            except HandoffError as error:
                _LOG.info("%s: %s; connecting again", self._endpoint, error)
            else:
                self._channel = channel
                return refused
        if self._is_closed:
            raise HandoffError(f"the connection to {self._endpoint} was closed")
        channel = join(self._endpoint, self.pool.device)
        refused = self._send(channel, writing, pages)
        self._channel = channel
        return refused

    def _send(self, channel: Channel, writing: Writing, pages: Sequence[int]) -> dict[int, StaleLeaseError]:
        manifest = Manifest(
            leases=[
                replace(lease, page_ids=lease.own_page_ids, shared_epochs=()) for lease in writing.leases
            ],
            num_written=[len(page_ids) for page_ids in writing.own_page_ids],
        )
        numbers = manifest.encode()
        channel.send(len(writing.leases), len(numbers))
        channel.send_numbers(numbers)
        for part in message_pages(len(pages), self.pool.page_bytes):
            channel.send_content(self.pool.read_pages(pages[part]))
        taken = channel.receive(len(writing.leases))
        return {
            i: StaleLeaseError(f"pages have a newer owner, refused epoch {writing.leases[i].epoch}")
            for i, was_taken in enumerate(taken)
            if not was_taken
        }
