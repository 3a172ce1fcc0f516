"""Structured output: which fields make which grammar, and which are refused at the door."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scheduler.api.tokenizer import Tokenizer
from scheduler.messages import Grammar
from tests.unit.scheduler.api.scripted import ScriptedEngine, app_over, chat, complete, events

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar(kind="json_object")),
        ({"response_format": FORMAT}, Grammar(kind="json_schema", text=json.dumps(SCHEMA))),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar(kind="json_schema", text=json.dumps(SCHEMA))),
        (
            {"structured_outputs": {"json": json.dumps(SCHEMA)}},
            Grammar(kind="json_schema", text=json.dumps(SCHEMA)),
        ),
        ({"structured_outputs": {"json_object": True}}, Grammar(kind="json_object")),
        ({"structured_outputs": {"regex": r"\d+/x"}}, Grammar(kind="regex", text=r"\d+/x")),
        ({"structured_outputs": {"choice": ["é", "b"]}}, Grammar(kind="choice", text=json.dumps(["é", "b"]))),
        (
            {"structured_outputs": {"regex": "a", "json": None}, "response_format": {"type": "text"}},
            Grammar(kind="regex", text="a"),
        ),
    ],
)
def test_the_grammar_reaches_the_engine(
    bytes_tokenizer: Tokenizer, fields: dict[str, Any], grammar: Grammar | None
) -> None:
    engine = ScriptedEngine(["x", "y"])
    app = app_over(engine, bytes_tokenizer)
    complete(app, **fields).raise_for_status()
    chat(app, **fields).raise_for_status()
    assert [request.sampling.grammar for request in engine.requests] == [grammar, grammar]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "must be 'text', 'json_object' or"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "must be provided"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}},
            "response_format",
            "Invalid type: objekt",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of json, json_object, regex, choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "got regex, choice"),
        ({"structured_outputs": {"regex": "[a"}}, "structured_outputs", "unclosed character class"),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs", "look-around"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "json_schema is not valid"),
        (
            {"structured_outputs": {"json": {"$ref": "#/a"}}},
            "structured_outputs",
            "Pointer '/a' does not exist",
        ),
        (
            {"structured_outputs": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}},
            "structured_outputs",
            "json_schema is not usable",
        ),
        ({"structured_outputs": {"regex": r"a[^\s\S]"}}, "structured_outputs", "regex is not usable"),
        ({"structured_outputs": {"json": {"uniqueItems": True}}}, "structured_outputs", "Unimplemented keys"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "must not be empty"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice", "must be a list"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar", "is not supported"),
        ({"structured_outputs": {"regex": "a" * 300_000}}, "structured_outputs", "at most 262144 characters"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "cannot both be given",
        ),
    ],
)
def test_what_is_refused(
    bytes_tokenizer: Tokenizer, fields: dict[str, Any], param: str, message: str
) -> None:
    engine = ScriptedEngine(["x"])
    answer = complete(app_over(engine, bytes_tokenizer), **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert message in answer.json()["error"]["message"]
    assert engine.requests == []


@pytest.mark.parametrize("stream", [False, True])
def test_what_only_a_worker_can_refuse_is_the_grammars_fault(
    bytes_tokenizer: Tokenizer, stream: bool
) -> None:
    engine = ScriptedEngine(errors={0: ("invalid", "regex is not usable: too much work")})
    answer = complete(app_over(engine, bytes_tokenizer), stream=stream, structured_outputs={"regex": "a+"})
    body = events(answer.text)[-1] if stream else answer.json()
    assert body["error"]["param"] == "structured_outputs"


def test_a_model_without_a_tokenizer_has_no_grammars() -> None:
    answer = complete(app_over(ScriptedEngine(["x"]), None), prompt=[1], structured_outputs={"regex": "a"})
    assert answer.status_code == 400
    assert "needs a model with a tokenizer" in answer.json()["error"]["message"]
