"""Handoff by messages, decode side."""

from __future__ import annotations

import logging
import threading
from itertools import count

from scheduler.errors import HandoffError
from worker.handoff.channel import DECODE_RANK, Channel, Endpoint, Manifest, message_pages
from worker.kv_pool import KVPool

_LOG = logging.getLogger(__name__)


class Receiver:
    """Owns the endpoint of a decode worker, and a thread for each prefill worker that sends to it.

    The threads write into pages that nobody reads yet, under the epoch of their lease; pages that have a newer one
    are passed over.
    """

    def __init__(self, pool: KVPool, *, name: str, host: str) -> None:
        self._pool = pool
        self._name = name
        self._endpoint = Endpoint(host)
        self._start(self._accept)

    @property
    def endpoint(self) -> str:
        """``HOST:PORT``, for `join`."""
        return self._endpoint.address

    def _accept(self) -> None:
        for number in count(1):
            self._endpoint.next_peer(number)
            self._start(self._serve, number)

    def _serve(self, number: int) -> None:
        """Take what one prefill worker sends, until it is gone."""
        try:
            channel = Channel(self.endpoint, number=number, rank=DECODE_RANK, device=self._pool.device)
            while True:
                self._take_writing(channel)
        except HandoffError as error:
            _LOG.info("%s: prefill peer %d is gone: %s", self._name, number, error)

    def _take_writing(self, channel: Channel) -> None:
        num_leases, num_numbers = channel.receive(2, is_first=True)
        manifest = Manifest.decode(channel.receive(num_numbers), num_leases, self._name)
        refused = set(self._pool.claim(manifest.leases))
        pages, epochs = manifest.targets()
        for part in message_pages(len(pages), self._pool.page_bytes):
            num_bytes = (part.stop - part.start) * self._pool.page_bytes
            content = channel.receive_content(num_bytes).view(self._pool.memory.dtype)
            self._pool.write_pages(pages[part], epochs[part], content)
        refused |= set(self._pool.check(manifest.leases))
        channel.send(*(i not in refused for i in range(num_leases)))

    @staticmethod
    def _start(target: object, *arguments: object) -> None:
        # They wait in torch for as long as the process lives, and end with it.
        threading.Thread(target=target, args=arguments, daemon=True).start()  # type: ignore[arg-type]
