"""The values that `purefill plan` prints are values of the chart, and make the fleet that was planned."""

from __future__ import annotations

import json
import shlex
from contextlib import redirect_stdout
from io import StringIO

import helm_python
import pytest
import yaml

from scheduler.cli import _parsers, main
from scheduler.config import ServeConfig
from scheduler.options import load_config
from tests.unit.deploy.chart import CHART, FULLNAME, one, render

ASKED = (
    "plan", "--trace", "poisson:rate=60,requests=60,prompt=900,output=20", "--slo", "ttft=200ms,itl=20ms",
    "--max-gpus", "6", "--processes", "1", "--max-num-seqs", "48",
)  # fmt: skip


def plan(*arguments: str) -> str:
    """Return what the command prints."""
    with redirect_stdout(StringIO()) as printed:
        assert main([*ASKED, *arguments]) == 0
    return printed.getvalue()


@pytest.fixture(scope="module")
def printed() -> tuple[str, dict[str, object]]:
    """A plan's text, and the settings of the same plan as JSON has them."""
    return plan(), json.loads(plan("--json"))[0]["serve"]


def test_the_command_line_is_one_that_the_program_takes(printed: tuple[str, dict[str, object]]) -> None:
    text, serve = printed
    (command,) = [line for line in text.splitlines() if line.startswith("purefill serve ")]
    options = vars(_parsers()[0].parse_args(shlex.split(command)[1:]))
    del options["command"]
    config = load_config(options, {})
    assert {name: getattr(config, name) for name in serve} == serve


def test_the_chart_takes_the_values_and_makes_the_fleet(printed: tuple[str, dict[str, object]]) -> None:
    text, serve = printed
    values = yaml.safe_load(text.partition("values of the Helm chart")[2].partition("\n")[2])
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)
    objects = render(values)
    groups = {
        group["groupName"]: group["replicas"]
        for group in one(objects, "RayCluster")["spec"]["workerGroupSpecs"]
    }
    fleet = {f"{kind}_workers": groups[kind] for kind in ("prefill", "decode")}
    assert fleet == {name: serve[name] for name in fleet}
    assert groups["shared"] == 0
    file = yaml.safe_load(one(objects, "ConfigMap", f"{FULLNAME}-config")["data"]["purefill.yaml"])
    config: ServeConfig = load_config({**file, "ray_address": "auto"}, {})
    assert {name: getattr(config, name) for name in serve if name not in fleet} == {
        name: value for name, value in serve.items() if name not in fleet
    }
