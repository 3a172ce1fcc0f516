from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler.cli import main
from scheduler.simulate.fleet_costs import read_costs, shipped_costs

LOAD = "gamma:rate=60,requests=300,prompt=200,output=30"


def simulate(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["simulate", "--trace", LOAD, *arguments]) == 0
    return capsys.readouterr().out


def test_the_same_seed_gives_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    def run(number: int, seed: str) -> tuple[bytes, bytes]:
        page = tmp_path / f"{number}.html"
        command = ["simulate", "--trace", LOAD, "--seed", seed, "--json", "--mtbf-s", "3", "--repair-s", "1"]
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "scheduler.cli",
                *command,
                "--prefill-workers",
                "2",
                "--decode-workers",
                "2",
                "--html",
                str(page),
            ],
            env={**os.environ, "PYTHONHASHSEED": str(number)},
            stdout=subprocess.PIPE,
            check=True,
        )
        return done.stdout, page.read_bytes()

    assert run(1, "7") == run(2, "7")


def test_another_seed_gives_another_load(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(capsys, "--seed", "7", "--requests", "50") != simulate(
        capsys, "--seed", "8", "--requests", "50"
    )


def test_json_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    figures = json.loads(simulate(capsys, "--json", "--slo", "ttft=200ms,itl=30ms", "--gpu-price", "3.6"))
    assert figures["requests"] == 300
    assert figures["outcomes"] == {"length": 300}
    assert figures["ttft_ms"]["p50"] <= figures["ttft_ms"]["p99"] <= figures["e2e_ms"]["p99"]
    assert 0 < figures["good_share"] <= 1
    num_tokens = (figures["prompt_tokens_per_s"] + figures["output_tokens_per_s"]) * figures["seconds"]
    cost = 2 * 3.6 * figures["seconds"] / 3600
    assert figures["cost_per_million_tokens"] == pytest.approx(1e6 * cost / num_tokens, rel=1e-4)
    assert max(figures["queue_over_time"]["most_waiting"]) > 0
    sizes = figures["batches"]["by_requests"]
    assert sum(int(size) * count for size, count in sizes.items()) == 300


def test_the_table_names_what_was_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    text = simulate(capsys, "--batch-policy", "adaptive", "--max-batch-requests", "16", "--slo", "e2e=10s")
    assert "1 prefill, 1 decode, adaptive, 16 requests or 20 ms" in text
    assert "SLO e2e=10000ms" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prefill-workers", "0"], "prefill_workers must be >= 1, got 0"),
        (["--batch-timeout-ms", "-1"], "batch_timeout_ms must be >= 0, got -1"),
        (["--max-num-seqs", "4"], "max_batch_requests must be <= max_num_seqs, which is 4, got 8"),
        (["--max-num-seqs", "999"], "must have a bucket of 999 sequences"),
        (["--slo", "ttft=0.2"], "slo: ttft must be a time > 0 such as 200ms or 1.5s, got '0.2'"),
        (["--slo", "tpot=3ms"], "slo must name ttft, itl or e2e, got tpot=3ms"),
        (["--cost-model", "none.json"], "cost_model must be a file or one of h200-qwen3-0.6b, h200-qwen3-8b"),
        (["--speed-up", "0"], "speed_up must be > 0, got 0"),
        (["--repeat", "0"], "repeat must be >= 1, got 0"),
        (["--flops-ratio", "-2"], "flops_ratio must be > 0, got -2"),
        (["--gpu-price", "-1"], "gpu_price must be >= 0, got -1"),
        (["--mtbf-s", "0"], "mtbf_s must be > 0, got 0"),
    ],
)
def test_a_wrong_setting_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["simulate", "--trace", LOAD, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "must be a JSON object of format purefill-fleet-costs-1"),
        ({"speed": 3}, "cost model holds an unknown field speed"),
        ({"page_size": None}, "lacks the field page_size"),
        ({"prefill_seconds": {}}, "prefill_seconds of cost model m must hold at least one bucket"),
        ({"prefill_seconds": {"16x8": -1}}, "by buckets such as 512x8, got 16x8: -1"),
        ({"decode_seconds": {"many": 1}}, "got many: 1"),
        ({"decode_seconds": [1]}, "decode_seconds must be a JSON object"),
        ({"decode_seconds": {"8": 0.1}}, "decode_seconds of cost model m must have a bucket of 64"),
        ({"num_pages": 0}, "num_pages of cost model m must be a number >= 1, got 0"),
    ],
)
def test_a_wrong_cost_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], message: str
) -> None:
    good = json.loads(shipped_costs()["h200-qwen3-8b"].read_text())
    data = {k: v for k, v in {**good, "name": "m", **changes}.items() if v is not None}
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(data))
    assert main(["simulate", "--trace", LOAD, "--cost-model", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("speed", {"speed": 3}),
        ("decode_seconds", {"decode_seconds": {"8": 0.1}}),
        ("decode_seconds", {"decode_seconds": [1]}),
        ("16x8", {"prefill_seconds": {"8x8": 0.1, "16x8": -1}}),
        ("num_pages", {"num_pages": 0}),
    ],
)
def test_what_is_wrong_with_a_cost_model_is_said_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, changes: dict[str, object]
) -> None:
    good = json.loads(shipped_costs()["h200-qwen3-8b"].read_text())
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({**good, **changes}, indent=1))
    (number,) = [i for i, line in enumerate(path.read_text().splitlines(), 1) if f'"{key}"' in line][:1]
    assert main(["simulate", "--trace", LOAD, "--cost-model", str(path)]) == 2
    assert f"costs.json, line {number}: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["h200-qwen3-0.6b", "h200-qwen3-8b"])
def test_shipped_cost_models_say_where_each_figure_is_from(name: str) -> None:
    costs = read_costs(name)
    assert "benchmarks/prefill_graphs.py" in costs.sources["prefill_seconds"]
    assert "2026-11-30" in costs.sources["decode_seconds"]
    assert {"num_pages", "message_s", "http_s", "attention_seconds_per_pair"} <= costs.sources.keys()


def test_another_gpu_is_marked_as_extrapolated_and_bound_by_bandwidth_where_this_one_is() -> None:
    this = read_costs("h200-qwen3-8b")
    other = this.on_other_gpu(flops_ratio=10, bandwidth_ratio=0.5)
    assert "not measured" in other.sources["prefill_seconds"]
    assert other.prefill_seconds["8192x8"] == pytest.approx(this.prefill_seconds["8192x8"] / 10)
    assert other.prefill_seconds["16x8"] == pytest.approx(this.prefill_seconds["16x8"] * 2)
    assert other.step_seconds[8] == pytest.approx(2 * this.step_seconds[8])


def test_a_plan_holds_the_slo_in_the_simulator_and_one_worker_less_does_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    load = "poisson:rate=100,requests=80,prompt=600,output=20"
    asked = ["--trace", load, "--slo", "ttft=150ms,itl=20ms", "--json"]
    assert main(["plan", *asked, "--max-gpus", "6", "--processes", "1"]) == 0
    plans = json.loads(capsys.readouterr().out)
    assert [plan["gpus"] for plan in plans] == sorted(plan["gpus"] for plan in plans)
    serve = plans[0]["serve"]

    def good_share(**changes: int) -> float:
        settings = {**serve, **changes}
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        assert main(["simulate", *asked, *flags]) == 0
        return float(json.loads(capsys.readouterr().out)["good_share"])

    assert good_share() == pytest.approx(plans[0]["good_share"], rel=1e-5)
    assert plans[0]["good_share"] >= 0.99
    for kind in ("prefill_workers", "decode_workers"):
        if serve[kind] > 1:
            assert good_share(**{kind: serve[kind] - 1}) < 0.99


def test_a_plan_is_the_same_on_any_number_of_processes(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--trace", LOAD, "--slo", "ttft=300ms", "--requests", "40", "--max-gpus", "4"]
    printed = []
    for num_processes in ("1", "3"):
        assert main([*asked, "--processes", num_processes]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]


def test_a_plan_that_cannot_be_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--trace", LOAD, "--slo", "ttft=1ms", "--max-gpus", "4", "--processes", "1"]
    assert main(["plan", *asked]) == 1
    assert "no fleet of that many GPUs holds ttft=1ms" in capsys.readouterr().out
