"""Public load generators run against the service without an error and with plausible figures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from scheduler.models import resolve_model
from tests.support.service import Service

REPO = Path(__file__).resolve().parents[2]
_HUB_REVISION = "0" * 40


def find_aiperf() -> str:
    """Return the aiperf command, or skip: it lives in an environment of its own, made by tests/run.sh."""
    local = REPO / ".venv-aiperf" / "bin" / "aiperf"
    command = shutil.which("aiperf") or (str(local) if local.exists() else None)
    if command is None:
        pytest.skip("aiperf is not installed; tests/run.sh installs it into .venv-aiperf")
    return command


def offline_hub(folder: Path) -> dict[str, str]:
    """Lay the model's tokenizer out as a hub cache, the one form in which aiperf takes it offline."""
    model = folder / "hub" / "models--local--tok"
    snapshot = model / "snapshots" / _HUB_REVISION
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(_HUB_REVISION)
    for file in resolve_model("smollm2-135m", progress=print).path.glob("tokenizer*.json"):
        shutil.copy(file, snapshot)
    return {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"}


def test_aiperf_runs_without_an_error(service: Service, tmp_path: Path) -> None:
    command = find_aiperf()
    artifacts = tmp_path / "artifacts"
    options = {
        "-m": service.model,
        "--url": service.url,
        "--endpoint-type": "completions",
        "--tokenizer": "local/tok",
        "--isl": "64",
        "--osl": "16",
        "--concurrency": "8",
        "--request-count": "50",
        "--random-seed": "1",
        "--ui": "none",
        "--artifact-dir": str(artifacts),
        "--extra-inputs": "ignore_eos:true",
    }
    done = subprocess.run(
        [command, "profile", "--streaming", *(word for pair in options.items() for word in pair)],
        env={**os.environ, **offline_hub(tmp_path / "hf")},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = artifacts.rglob("profile_export_aiperf.json")
    figures = json.loads(report.read_text())
    assert figures["request_count"]["avg"] == 50
    assert not figures.get("error_request_count", {}).get("avg")
    assert not figures.get("error_summary")
    assert figures["output_sequence_length"]["avg"] == pytest.approx(16, abs=1)
    assert 0 < figures["time_to_first_token"]["p50"] < figures["request_latency"]["p50"]
