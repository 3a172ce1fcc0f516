"""What `purefill serve` holds of the machine that it runs on: its port, and the signals sent to it."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from scheduler.errors import ConfigError


class StopSignal(BaseException):
    """Ctrl-C or SIGTERM. Not an `Exception`, so that nothing on the way handles it."""


@contextmanager
def reserved_port(host: str, port: int) -> Iterator[int]:
    """Keep the port, or a free one for 0, for the ApiServers, which share it. Raises `ConfigError` if it is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    keeper = socket.socket(family, socket.SOCK_STREAM)
    try:
        socket.getaddrinfo(host, port)  # create_server would not say that it is the host that is wrong
        # An ApiServer of another service would share its port with ours: this socket shares with nobody.
        with socket.create_server((host, port), family=family) as probe:
            port = probe.getsockname()[1]
        # It takes a while until the ApiServers bind it, and Ray opens many ports of its own until then. Without
        # SO_REUSEADDR this socket, which does not listen, stands in the way of other probes.
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        keeper.bind((host, port))
    except (socket.gaierror, UnicodeError) as error:
        keeper.close()
        raise ConfigError(f"host must be an address of this machine, got {host}") from error
    except OSError as error:
        keeper.close()
        raise ConfigError(f"port {port} on {host} cannot be used: {os.strerror(error.errno or 0)}") from error
    with keeper:
        yield port


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into `StopSignal` in the main thread, and ignore the ones after it."""

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise StopSignal

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def signals_held() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in the list that is given, and let their handlers have the first at the end.

    What a handler raises while Ray's compiled code waits comes out when that has its answer, minutes later
    perhaps, and as another error.
    """
    came: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        came.append(number)

    previous = {number: signal.signal(number, hold) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
