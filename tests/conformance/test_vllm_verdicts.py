"""The same requests are accepted and refused as by vLLM's own validation, but for documented exceptions.

`ask_vllm.py` made the requests and has vLLM's verdicts on them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.conformance.ask_vllm import VERDICTS, generated
from tests.unit.scheduler.api.scripted import ScriptedEngine, app_over, byte_tokenizer, send


def is_exception(body: dict[str, Any]) -> bool:
    """Whether docs/api.md says that we decide otherwise: by the type of a number, null, and the range of a bias."""
    return (
        body.get("max_tokens") == "5"  # a number as text is refused
        or ("n" in body and body["n"] is None)  # null counts as not given
        or body.get("logit_bias") == {"5": 101}  # refused, as OpenAI does, and not clamped
    )


def test_requests_are_accepted_and_refused_as_by_vllm(tmp_path: Path) -> None:
    verdicts = json.loads(VERDICTS.read_text())
    # The file is that of these requests.
    assert [{"path": v["path"], "body": v["body"]} for v in verdicts] == generated(len(verdicts))
    engine = ScriptedEngine()
    app = app_over(engine, byte_tokenizer(tmp_path))
    differences = []
    num_accepted = 0
    for verdict in verdicts:
        engine.restart(["x"] * 4)
        content = json.dumps(verdict["body"])
        answer = send(
            app, "POST", verdict["path"], content=content, headers={"content-type": "application/json"}
        )
        assert answer.status_code in (200, 400), content
        num_accepted += answer.status_code == 200
        if (answer.status_code == 200) != (verdict["refusal"] is None) and not is_exception(verdict["body"]):
            differences.append((verdict, answer.text))
    assert differences == []
    assert 100 < num_accepted < len(verdicts) - 100
