"""A real `purefill serve` process for tests."""

from __future__ import annotations

import json
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
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

_MARK = "PURE_TEST_MARK"
_START_TIMEOUT_S = 240
_STOP_TIMEOUT_S = 30


@dataclass
class Service:
    """A running service. `log` grows as it writes."""

    url: str
    metrics_url: str
    model: str
    process: subprocess.Popen[str]
    mark: str
    log: list[str] = field(default_factory=list)
    grown: threading.Condition = field(default_factory=threading.Condition)
    """Notified with each line of the log."""

    def log_until(self, text: str) -> list[str]:
        """Wait until a line of the log has this text, and return all lines."""
        with self.grown:
            self.grown.wait_for(lambda: any(text in line for line in self.log))
            return list(self.log)

    def metric(self, name: str, **labels: str) -> float:
        """Return a metric's value, 0 if it has none yet; over all label sets that have the given labels."""
        text = httpx.get(self.metrics_url).raise_for_status().text
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

    def gcs_address(self) -> str:
        """Return the address of the service's own Ray cluster."""
        commands = (Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in self.processes())
        found = {
            match[1] for command in commands if (match := re.search(r"--gcs-address=([\d.:]+)", command))
        }
        (address,) = found
        return address

    def ray_view(self) -> dict[str, Any]:
        """Return what Ray says: ``actors``, states by name, and ``endpoints``, where nodes show metrics."""
        ended = subprocess.run(
            [sys.executable, "-m", "tests.support.ray_view", self.gcs_address()],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "RAY_AUTH_MODE": "token"},
        )
        assert ended.returncode == 0, ended.stderr
        view: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        return view

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
    service = Service(url="", metrics_url="", model="", process=process, mark=mark)
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
        with service.grown:
            service.log.append(line)
            service.grown.notify_all()
        for row in _rows(line):
            if match := re.match(r"\s*API\s+(http://\S+)/v1/completions", row):
                service.url = match[1]
            if match := re.match(r"\s*metrics\s+(http://\S+)", row):
                service.metrics_url = match[1]
            if re.match(r"\s*dashboard\s", row):
                ready.set()
    ready.set()


def _rows(line: str) -> list[str]:
    """Return the rows of the summary that a line of the log holds: itself, or all of them if it is JSON."""
    if not line.startswith("{"):
        return [line]
    return [f"{name} {value}" for name, value in json.loads(line).items()]
