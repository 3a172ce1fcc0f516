"""A service writes what `purefill simulate` needs: its cost model, and the requests that it had."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from scheduler.cli import main
from scheduler.simulate.fleet_costs import read_costs
from scheduler.simulate.traces import read_trace
from tests.support.random_llama import save_random_llama
from tests.support.service import serve


def test_the_service_writes_its_costs_and_its_load_and_both_can_be_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_random_llama(tmp_path / "model")
    costs_file, log = tmp_path / "costs.json", tmp_path / "requests.csv"
    with serve(
        "--model", str(tmp_path / "model"),
        "--max-num-seqs", "16",
        "--write-cost-model", str(costs_file),
        "--request-log", str(log),
    ) as service:  # fmt: skip
        for num_tokens in (3, 7):
            body = {"model": service.model, "prompt": [5] * 11, "max_tokens": num_tokens, "ignore_eos": True}
            answer = httpx.post(f"{service.url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200
    costs = read_costs(str(costs_file))
    costs.check(max_num_seqs=16)
    assert costs.is_device_shared
    assert costs.max_model_len == 512
    assert "idle service" in costs.sources["http_s"]
    # Without those by which the service measured itself.
    assert [(a.num_prompt, a.num_output) for a in read_trace(log)] == [(11, 3), (11, 7)]
    asked = ["--trace", str(log), "--cost-model", str(costs_file), "--max-num-seqs", "16", "--json"]
    assert main(["simulate", *asked]) == 0
    assert json.loads(capsys.readouterr().out)["outcomes"] == {"length": 2}
