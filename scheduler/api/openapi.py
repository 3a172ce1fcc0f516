"""The OpenAPI schema of the service, and a page that shows it without loading anything from elsewhere."""

from __future__ import annotations

import html
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from scheduler.api.chat_protocol import ChatChunk, ChatRequest
from scheduler.api.completion_protocol import CompletionRequest
from scheduler.api.idempotency import KEY_HEADER, MAX_KEY_CHARS
from scheduler.api.service_protocol import (
    DetokenizeRequest,
    ErrorResponse,
    TokenizeChatRequest,
    TokenizeTextRequest,
)

_REF = "#/components/schemas/{model}"
_BODIES: tuple[type[BaseModel], ...] = (
    ChatChunk,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
OPEN_PATHS = ("/health", "/ready", "/metrics", "/load", "/status", "/version", "/docs", "/openapi.json")
"""Need no API key."""


_LIMITS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def body_of(*models: type[BaseModel]) -> dict[str, Any]:
    """Return what a route's schema says of the body that it reads itself: one of these models."""
    schemas = [{"$ref": _REF.format(model=model.__name__)} for model in models]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


KEYED: dict[str, Any] = {
    "parameters": [
        {
            "name": KEY_HEADER,
            "in": "header",
            "required": False,
            "description": "Whoever sends it again gets the same result, computed once.",
            "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARS, "pattern": "^[!-~]+$"},
        }
    ]
}
"""What the schema says of routes whose requests can be repeated."""


def stream_of(chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Return what a route's schema says of its stream, whose events hold these chunks."""
    # Not `schema`: that would be said of an event, of which the chunk is the data.
    chunks = [
        {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {"$ref": _REF.format(model=model.__name__)},
        }
        for model in (chunk, ErrorResponse)
    ]
    data = {"anyOf": [*chunks, {"const": "[DONE]"}]}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {
        200: {
            "description": "The answer, or with `stream` one event for each chunk, perhaps an error, and `[DONE]`.",
            "content": {"text/event-stream": {"itemSchema": event}},
        }
    }


def openapi_schema(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI schema of an application of ours."""
    schema: dict[str, Any] = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, definitions = models_json_schema([(model, "validation") for model in _BODIES], ref_template=_REF)
    components = schema.setdefault("components", {})
    bodies = _with_json_limits(definitions.get("$defs", {}))
    components["schemas"] = {**bodies, **components.get("schemas", {})}
    components["securitySchemes"] = {"ApiKey": {"type": "http", "scheme": "bearer"}}
    for path, operations in schema["paths"].items():
        if path not in OPEN_PATHS:
            for operation in operations.values():
                operation["security"] = [{"ApiKey": []}, {}]
    return schema


def _with_json_limits(part: Any) -> Any:
    """Return a schema with JSON schema's names for limits, where pydantic left its own.

    It does so where a limit follows a function that changes the value.
    """
    if isinstance(part, list):
        return [_with_json_limits(item) for item in part]
    if not isinstance(part, dict):
        return part
    return {_LIMITS.get(name, name): _with_json_limits(value) for name, value in part.items()}


def docs_page(schema: dict[str, Any]) -> str:
    """Return a page of HTML with all routes and the fields of their bodies and answers."""
    routes = "".join(
        f"<h2>{method.upper()} {html.escape(path)}</h2><p>{_text(operation)}</p>{_links(operation)}"
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
    )
    models = "".join(
        f'<h3 id="{name}">{name}</h3><p>{_text(model)}</p>{_fields(model)}'
        for name, model in sorted(schema["components"]["schemas"].items())
    )
    style = (
        "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
        "td,th{padding:.2em .8em;text-align:left;vertical-align:top}tr:nth-child(odd){background:#f4f4f4}"
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>purefill {schema["info"]["version"]}</title>'
        f"<style>{style}</style><h1>purefill {schema['info']['version']}</h1>"
        f'<p>The same as <a href="openapi.json">OpenAPI schema</a>.</p>{routes}{models}</html>'
    )


def _links(operation: dict[str, Any]) -> str:
    """Return links to the models of a route's body and of its answer."""
    parts = []
    for title, part in (
        ("Body", operation.get("requestBody", {})),
        ("Answer", operation.get("responses", {}).get("200", {})),
    ):
        kinds = [_kind(_said_of(content)) for content in part.get("content", {}).values()]
        if kinds:
            parts.append(f"{title}: {' or '.join(dict.fromkeys(kinds))}")
    return f"<p>{'<br>'.join(parts)}</p>"


def _said_of(content: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a body or an answer; of a stream, that of its chunks."""
    if "itemSchema" in content:
        chunk: dict[str, Any] = content["itemSchema"]["properties"]["data"]["anyOf"][0]["contentSchema"]
        return chunk
    schema: dict[str, Any] = content.get("schema", {})
    return schema


def _fields(model: dict[str, Any]) -> str:
    required = model.get("required", ())
    rows = "".join(
        f"<tr><td><code>{html.escape(name)}</code>{' *' if name in required else ''}</td>"
        f"<td>{_kind(field)}</td><td>{_limits(field)}</td><td>{_text(field)}</td></tr>"
        for name, field in model.get("properties", {}).items()
    )
    return f"<table><tr><th>field<th>type<th>limits<th>meaning</tr>{rows}</table>" if rows else ""


def _kind(field: dict[str, Any]) -> str:
    """Return the type of a field, with links to models."""
    if "$ref" in field:
        name = field["$ref"].rsplit("/", 1)[1]
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in field:
        return " | ".join(dict.fromkeys(map(_kind, field["anyOf"])))
    if "const" in field or "enum" in field:
        return " | ".join(html.escape(repr(value)) for value in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}))}"
    return html.escape(str(field.get("type", "any")))


def _limits(field: dict[str, Any]) -> str:
    words = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    options = [field, *field.get("anyOf", ())]
    limits = [f"{words[key]} {option[key]:g}" for option in options for key in words if key in option]
    if field.get("default") is not None:
        limits.append(f"default {field['default']!r}")
    return html.escape(", ".join(limits))


def _text(part: dict[str, Any]) -> str:
    return html.escape(part.get("description", ""))
