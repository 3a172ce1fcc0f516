"""Structured output: from OpenAI's and vLLM's fields to the grammar that an output must match."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from scheduler.api.fields import STRICT, refuse_unsupported
from scheduler.errors import InvalidRequestError
from scheduler.messages import Grammar

_CACHED = 256
_MAX_CHARS = 262_144

_FORMS = ("json", "json_object", "regex", "choice")


class JsonSchemaFormat(BaseModel):
    """A schema with its name."""

    model_config = STRICT

    name: str = ""
    description: str | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")] = {}
    """The JSON schema. None: any object."""
    strict: bool | None = None
    """Makes no difference: the output always matches."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return _without_nulls(data)


class ResponseFormat(BaseModel):
    """OpenAI's field: text, a JSON object, or JSON that matches a schema."""

    model_config = STRICT

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise InvalidRequestError(
                "response_format.json_schema must be provided with type json_schema",
                param="response_format.json_schema",
            )
        return self


class StructuredOutputs(BaseModel):
    """vLLM's field. One of its forms must be given."""

    model_config = STRICT

    json_schema: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    """A JSON schema, or its text."""
    json_object: bool | None = None
    """Whether the output must be a JSON object."""
    regex: Annotated[str, Field(min_length=1)] | None = None
    """The regular expression that the whole output must match."""
    choice: (
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1024)] | None
    ) = None
    """The output is one of these."""

    @model_validator(mode="before")
    @classmethod
    def _check_form(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = _without_nulls(data)
        for name in ("grammar", "structural_tag"):
            if name in given:
                refuse_unsupported(
                    {f"structured_outputs.{name}": given[name]}, {f"structured_outputs.{name}": ()}
                )
        forms = [name for name in _FORMS if given.get(name) not in (None, False)]
        if len(forms) != 1:
            raise InvalidRequestError(
                f"structured_outputs must hold exactly one of {', '.join(_FORMS)}, got {', '.join(forms) or 'none'}",
                param="structured_outputs",
            )
        return given


def grammar_of(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None
) -> Grammar | None:
    """Return what the output must match, or None. Raises InvalidRequestError if both fields say something."""
    formatted = _formatted(response_format)
    if structured is None:
        return formatted
    if formatted is not None:
        raise InvalidRequestError(
            "structured_outputs and response_format cannot both be given", param="structured_outputs"
        )
    if structured.regex is not None:
        return Grammar(kind="regex", text=structured.regex)
    if structured.choice is not None:
        return Grammar(kind="choice", text=json.dumps(structured.choice))
    if structured.json_schema is not None:
        schema = structured.json_schema
        return Grammar(kind="json_schema", text=schema if isinstance(schema, str) else json.dumps(schema))
    return Grammar(kind="json_object")


def _formatted(response_format: ResponseFormat | None) -> Grammar | None:
    if response_format is None or response_format.type == "text":
        return None
    if response_format.json_schema is None or response_format.type == "json_object":
        return Grammar(kind="json_object")
    return Grammar(kind="json_schema", text=json.dumps(response_format.json_schema.json_schema))


def _without_nulls(data: Any) -> Any:
    return (
        {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data
    )


class GrammarChecker:
    """Compiles grammars to see whether they are valid, and remembers those of late."""

    def __init__(self) -> None:
        self._known: OrderedDict[Grammar, str] = OrderedDict()

    async def check(self, grammar: Grammar, param: str) -> None:
        """Return if the grammar of field `param` is one that an output can match. Raises InvalidRequestError.

        Large ones take a while to compile, so a thread does it and the event loop goes on.
        """
        problem = self._known.get(grammar)
        if problem is None:
            problem = await asyncio.to_thread(problem_of, grammar)
            self._known[grammar] = problem
            while len(self._known) > _CACHED:
                self._known.popitem(last=False)
        if problem:
            raise InvalidRequestError(f"{param}: {problem}", param=param)


def problem_of(grammar: Grammar) -> str:
    """Return what is wrong with a grammar, in one line, or an empty text."""
    if len(grammar.text) > _MAX_CHARS:
        return f"{grammar.kind} must have at most {_MAX_CHARS} characters, got {len(grammar.text)}"
    # Importing it takes a third of a second, which few requests need.
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

    try:
        match grammar.kind:
            case "json_object":
                return ""
            case "choice":
                "".join(json.loads(grammar.text)).encode()  # half a surrogate pair fails here
                return ""
            case "json_schema":
                source = LLMatcher.grammar_from_json_schema(_object(grammar.text))
            case "regex":
                # As the workers do it: digits are 0 to 9, whatever else Unicode calls one.
                source = f"start: /{regex_to_lark(grammar.text, 'd')}/"
        is_error, messages = LLMatcher.validate_grammar_with_warnings(source)
        if is_error:
            return f"{grammar.kind} is not valid: {_one_line(messages[0])}"
        # Whether anything matches at all shows at the first token, for which bytes do.
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(LLTokenizer("byte"), source, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
    except (ValueError, RecursionError) as error:
        return f"{grammar.kind} is not valid: {_one_line(str(error))}"
    return f"{grammar.kind} is not usable: {_one_line(matcher.get_error())}" if matcher.is_error() else ""


def _object(text: str) -> dict[str, Any]:
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise ValueError("it must be a JSON object")
    return schema


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
