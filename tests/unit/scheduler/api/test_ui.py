from __future__ import annotations

import re

import pytest

from tests.unit.scheduler.api.scripted import ScriptedEngine, app_over, send

_FILES = ("", "/page.css", "/page.js", "/figures.js", "/format.js", "/plots.js", "/prompt.js", "/icon.svg")


@pytest.mark.parametrize("name", _FILES)
def test_files_need_no_key_and_allow_nothing_from_elsewhere(name: str) -> None:
    app = app_over(ScriptedEngine(), None, api_keys=("secret",))
    answer = send(app, "GET", f"/ui{name}")
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    text = answer.text.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert not re.search(r"https?://|<script>|\sstyle=|\son\w+=", text)
