from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path

import pytest

from scheduler.cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["serve", "--batch-timout-ms", "5"],
            "unknown option --batch-timout-ms; did you mean --batch-timeout-ms?",
        ),
        (
            ["serve", "--batch-timout-ms=5"],
            "unknown option --batch-timout-ms; did you mean --batch-timeout-ms?",
        ),
        (["serve", "--zzz"], "unknown option --zzz"),
        (["serve", "--max-num", "5"], "unknown option --max-num; did you mean --max-num-seqs?"),
        (["serve", "here"], "unexpected argument here"),
        (["serve", "--port"], "argument --port: expected one argument"),
        (["serve", "--batch-timeout-ms", "-1"], "batch_timeout_ms must be >= 0, got -1"),
        (["serve", "--model", "smollm2"], None),
        (["models", "--lst"], "unknown option --lst; did you mean --list?"),
        (["models", "no-such-model"], None),
        ([], "the following arguments are required: COMMAND"),
        (["sevre"], None),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], message: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2

    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert output.err.startswith("purefill: error: ")
    if message is not None:
        assert output.err == f"purefill: error: {message}\n"


def test_a_wrong_variable_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PUREFILL_PORT", "high")

    assert main(["serve"]) == 2
    assert (
        capsys.readouterr().err
        == "purefill: error: port must be a whole number, got 'high' (from PUREFILL_PORT)\n"
    )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])

    assert capsys.readouterr().out == f"purefill {version('purefill')}\n"


def test_help_names_each_option_and_default_and_imports_nothing_heavy() -> None:
    code = """
import sys
from scheduler.cli import main
try:
    main(["serve", "--help"])
finally:
    assert not {"torch", "transformers", "ray", "fastapi", "huggingface_hub"} & set(sys.modules)
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert answer.returncode == 0, answer.stderr
    text = " ".join(answer.stdout.split())
    assert (
        "--batch-timeout-ms NUMBER longest that a prompt is held for others to join its batch (default: 20)"
        in text
    )
    assert "--batch-policy {fixed,adaptive}" in text
    assert "--max-capture-tokens N" in text


def test_models_shows_name_size_and_folder_of_what_is_cached(tmp_path: Path) -> None:
    def purefill(*arguments: str) -> tuple[str, str]:
        environ = os.environ | {"PUREFILL_CACHE": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub")}
        command = [sys.executable, "-m", "scheduler.cli", *arguments]
        answer = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
        return answer.stdout, answer.stderr

    assert purefill("models", "--list") == ("", f"no model is cached in {tmp_path}\n")

    folder = tmp_path / "models" / "smollm2-135m"
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_bytes(bytes(1_000_000))
    assert purefill("models") == (f"smollm2-135m\t3 MB\t{folder}\n", "")


class StatusServer:
    """Answers ``GET /status`` with one answer."""

    def __init__(self, code: int, body: dict[str, object]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                assert self.path == "/status"
                self.send_response(code)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> str:
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return self.url

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


STATUS = {
    "ready": True,
    "problem": None,
    "version": "1",
    "model": "m",
    "live_requests": 3,
    "queue_requests": 2,
    "queue_tokens": 9,
    "actors": [{"name": "decode-0", "pool": "decode", "state": "dead", "start_time": 0.0}],
}


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    ("code", "body", "exit_code", "text"),
    [
        (200, STATUS, 0, "serves m: ready"),
        (200, {**STATUS, "ready": False, "problem": "decode-0 died"}, 1, "not ready: decode-0 died"),
        (503, {"error": {"message": "the scheduler is not running"}}, 1, "the scheduler is not running"),
        (404, {}, 3, "answers 404"),
    ],
)
def test_status(
    code: int,
    body: dict[str, object],
    exit_code: int,
    text: str,
    as_json: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with StatusServer(code, body) as url:
        assert main(["status", "--url", url, *(["--json"] if as_json else [])]) == exit_code
    output = capsys.readouterr().out
    if as_json:
        status = json.loads(output)
        assert status["ready"] == (exit_code == 0)
        assert code != 200 or status == body
    else:
        assert text in output
        assert code != 200 or "decode-0      decode     dead      1970-01-01 00:00:00+00:00" in output


def test_status_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert main(["status", "--url", f"http://127.0.0.1:{port}", "--json"]) == 3
    assert "does not answer" in json.loads(capsys.readouterr().out)["problem"]
