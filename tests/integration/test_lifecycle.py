"""Starting and stopping: one clear line when it cannot start, and nothing left behind when it stops."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from tests.support.service import serve


def files_in_shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything(number: signal.Signals) -> None:
    before = files_in_shared_memory()
    with serve("--max-capture-tokens", "32", "--drain-timeout-s", "0") as service:
        # One request is in the middle of its stream when the signal comes.
        body = {"model": service.model, "prompt": "Count", "max_tokens": 4000, "stream": True}
        reading = threading.Event()

        def read() -> None:
            with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=60) as response:
                try:
                    for _ in response.iter_lines():
                        reading.set()
                except httpx.TransportError:
                    pass  # The connection may be cut.

        reader = threading.Thread(target=read)
        reader.start()
        assert reading.wait(60)
        assert len(service.processes()) > 4
        assert service.stop(number) == 0
        reader.join()
        assert service.processes() == []
        assert "Traceback" not in "".join(service.log)
    assert files_in_shared_memory() <= before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_start(number: signal.Signals) -> None:
    """Ctrl-C goes to all processes of a terminal, and does not wait until the model is loaded."""
    command = [sys.executable, "-m", "scheduler.cli", "serve", "--port", "0", "--max-capture-tokens", "32"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "loading" in line:
                break
        os.killpg(process.pid, number)
        rest = process.stderr.read()
    assert process.returncode == 0, rest
    assert "purefill: stopped" in rest
    assert "is ready" not in rest
    assert "Traceback" not in rest


def start_and_fail(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scheduler.cli", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = start_and_fail("--port", str(port))
    assert ended.returncode == 2
    assert (
        ended.stderr == f"purefill: error: port {port} on 127.0.0.1 cannot be used: Address already in use\n"
    )


def test_a_folder_without_weights_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    ended = start_and_fail("--model", str(tmp_path))
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "weights" in ended.stderr


def test_an_unknown_option_is_one_clear_line() -> None:
    ended = start_and_fail("--max-batch-request", "8")
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "--max-batch-request" in ended.stderr


def test_a_model_that_cannot_work_is_refused_with_its_reason(tmp_path: Path) -> None:
    """What only the worker can know reaches the user as one line too, without a traceback."""
    (tmp_path / "config.json").write_text('{"model_type": "t5", "is_encoder_decoder": true}')
    ended = start_and_fail("--model", str(tmp_path), "--load-format", "dummy")
    assert ended.returncode == 2
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("purefill: error: ")
    assert "not decoder-only" in last
    assert "Traceback" not in ended.stderr
