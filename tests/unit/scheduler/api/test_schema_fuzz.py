"""Requests made from our own OpenAPI schema, valid and not: no 5xx, and every answer is one that the schema has."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from scheduler.api.engine import TokenStream
from scheduler.messages import Request
from tests.unit.scheduler.api.scripted import MODEL, ScriptedEngine, app_over, byte_tokenizer


class AnsweringEngine(ScriptedEngine):
    """Answers every request with two tokens, with the logprobs that it asks for."""

    async def submit(self, requests: Sequence[Request]) -> TokenStream:
        self.restart(["ab"] * len(requests))
        return await super().submit(requests)


with tempfile.TemporaryDirectory() as folder:
    APP = app_over(AnsweringEngine(), byte_tokenizer(Path(folder)))
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP)


@SCHEMA.parametrize()
@settings(max_examples=30, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
def test_answers_are_those_of_the_schema(case: Any) -> None:
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = MODEL.name  # no schema tells which names are served
    case.call_and_validate(
        checks=[
            not_a_server_error,
            content_type_conformance,
            response_schema_conformance,
            status_code_conformance,
        ]
    )
