"""The image, the compose file, and the chart's README."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from scheduler.cli import _parsers
from scheduler.options import load_config
from tests.unit.deploy.chart import CHART, REPO

DEPLOY = REPO / "deploy"
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a program of this Python's environment, or of the path."""
    own = Path(sys.executable).parent / command[0]
    return subprocess.run(
        [str(own) if own.exists() else command[0], *command[1:]], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    """The services as Docker Compose itself reads them."""
    result = run(
        "docker-compose",
        "--file",
        str(DEPLOY / "compose.yaml"),
        "--file",
        str(DEPLOY / "compose.gpu.yaml"),
        "config",
    )
    assert result.returncode == 0, result.stderr
    return dict(yaml.safe_load(result.stdout)["services"])


def test_the_linter_finds_nothing() -> None:
    result = run("hadolint", "--failure-threshold", "style", str(DOCKERFILE))
    assert result.returncode == 0, result.stdout


def test_the_image_copies_what_is_there_and_what_the_context_has() -> None:
    sources = [
        source
        for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE.read_text(), flags=re.MULTILINE)
        for source in line.split()[:-1]
    ]
    context = {
        line.removeprefix("!").removesuffix("/**")
        for line in (REPO / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert set(sources) == context
    assert all((REPO / source).exists() for source in sources)


def test_the_image_runs_as_the_user_that_the_chart_asks_for() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    user = values["podSecurityContext"]["runAsUser"]
    assert f"\nUSER {user}:{values['podSecurityContext']['runAsGroup']}\n" in DOCKERFILE.read_text()
    assert f"useradd --uid {user} " in DOCKERFILE.read_text()


def test_ray_in_the_chart_is_ray_in_the_image() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert f"ray=={values['ray']['version']}\n" in (DEPLOY / "constraints.txt").read_text()


def test_the_chart_and_the_compose_file_are_of_this_version(services: dict[str, dict[str, Any]]) -> None:
    (version,) = re.findall(r'^version = "(.*)"$', (REPO / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == version
    assert services["purefill"]["image"] == f"purefill:{version}"


def test_the_compose_file_starts_what_the_real_program_takes(services: dict[str, dict[str, Any]]) -> None:
    service = services["purefill"]
    options = vars(_parsers()[0].parse_args(service["command"][1:]))
    assert options.pop("command") == "serve"
    config = load_config(options, service["environment"])
    assert config.journal == "redis://redis:6379"
    (port,) = service["ports"]
    assert port["target"] == config.port
    assert f"purefill:{config.port}" in (DEPLOY / "docker" / "prometheus.yml").read_text()
    minutes = re.fullmatch(r"(\d+)m0s", service["stop_grace_period"])
    assert minutes is not None
    assert int(minutes[1]) * 60 > config.drain_timeout_s


def test_the_compose_file_pins_images_and_opens_no_port_to_others(
    services: dict[str, dict[str, Any]],
) -> None:
    for service in services.values():
        assert re.search(r":v?\d+\.\d+", service["image"])
        assert all(port["host_ip"] == "127.0.0.1" for port in service.get("ports", []))


def test_files_that_the_compose_file_mounts_are_there(services: dict[str, dict[str, Any]]) -> None:
    mounted = [
        Path(volume["source"])
        for service in services.values()
        for volume in service.get("volumes", [])
        if volume["type"] == "bind"
    ]
    assert len(mounted) == 5
    assert all(path.exists() for path in mounted)


def test_the_charts_readme_is_fresh() -> None:
    result = run(sys.executable, str(DEPLOY / "helm" / "readme.py"), "--check")
    assert result.returncode == 0, result.stderr
