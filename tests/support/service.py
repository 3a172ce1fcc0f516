"""A real `purefill serve` process for tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

_MARK = "PURE_TEST_MARK"
_START_TIMEOUT_S = 240
_STOP_TIMEOUT_S = 30


@dataclass
class Service:
    """A running service. `log` grows as it writes."""

    url: str
    model: str
    process: subprocess.Popen[str]
    mark: str
    log: list[str] = field(default_factory=list)

    def metric(self, name: str, **labels: str) -> float:
        """Return a metric's value, 0 if it has none yet; over all label sets that have the given labels."""
        text = httpx.get(f"{self.url}/metrics").raise_for_status().text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def processes(self) -> list[int]:
        """Return the ids of all processes that the service started, itself included, and that still run."""
        names = (path.name for path in Path("/proc").iterdir())
        return [pid for pid in map(int, filter(str.isdigit, names)) if self._owns(pid)]

    def _owns(self, pid: int) -> bool:
        try:
            return f"{_MARK}={self.mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(_STOP_TIMEOUT_S)


@contextmanager
def serve(*arguments: str, env: dict[str, str] | None = None) -> Iterator[Service]:
    """Run `purefill serve --port 0 ARGUMENTS` until the block ends."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-m", "scheduler.cli", "serve", "--port", "0", *arguments],
        stderr=subprocess.STDOUT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {}), _MARK: mark},
    )
    assert process.stdout is not None
    service = Service(url="", model="", process=process, mark=mark)
    ready = threading.Event()
    reader = threading.Thread(target=_read, args=(service, ready), daemon=True)
    reader.start()
    try:
        assert ready.wait(_START_TIMEOUT_S), "the service did not start in time:\n" + "".join(service.log)
        assert service.url, "the service ended at its start:\n" + "".join(service.log)
        service.model = httpx.get(f"{service.url}/v1/models").raise_for_status().json()["data"][0]["id"]
        yield service
    finally:
        if process.poll() is None:
            service.stop()
        for pid in service.processes():
            os.kill(pid, signal.SIGKILL)
        reader.join()
        process.stdout.close()


def _read(service: Service, ready: threading.Event) -> None:
    """Keep what the service writes, and its URL from the summary; ends with the service."""
    assert service.process.stdout is not None
    for line in service.process.stdout:
        service.log.append(line)
        if match := re.match(r"\s+API\s+(http://\S+)/v1/completions", line):
            service.url = match[1]
        if re.match(r"\s+dashboard\s", line):
            ready.set()
    ready.set()
