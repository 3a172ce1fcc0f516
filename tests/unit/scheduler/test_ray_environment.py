from __future__ import annotations

import pytest

from scheduler.config import ServeConfig
from scheduler.ray_environment import set_ray_environment

LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def environment_for(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], **settings: object
) -> dict[str, str]:
    environ = dict(given)
    monkeypatch.setattr("os.environ", environ)
    set_ray_environment(ServeConfig.model_validate(settings))
    return environ


def test_a_ray_of_our_own_keeps_to_the_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment_for(monkeypatch, {})[LOOPBACK] == "0"
    assert environment_for(monkeypatch, {LOOPBACK: "1"})[LOOPBACK] == "1"
    assert LOOPBACK not in environment_for(monkeypatch, {}, ray_address="auto")


def test_rays_processes_inherit_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"PUREFILL_API_KEYS": "a,b", "PUREFILL_JOURNAL": "redis://:password@h", "PUREFILL_CACHE": "/c"}
    environ = environment_for(monkeypatch, given)
    assert environ["PUREFILL_CACHE"] == "/c"
    assert not {"PUREFILL_API_KEYS", "PUREFILL_JOURNAL"} & environ.keys()


@pytest.mark.parametrize(("usage_stats", "value"), [(False, "0"), (True, "1")])
def test_usage_statistics_have_an_option(
    monkeypatch: pytest.MonkeyPatch, usage_stats: bool, value: str
) -> None:
    environ = environment_for(monkeypatch, {"RAY_USAGE_STATS_ENABLED": "1"}, usage_stats=usage_stats)
    assert environ["RAY_USAGE_STATS_ENABLED"] == value
