"""The model's chat template: from messages to the text of a prompt.

Templates are Jinja programs that come with the model, written for what transformers gives them: a sandbox, some
functions, and the special tokens. The same is given to them here, without transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from scheduler.errors import ConfigError, InvalidRequestError

_TEMPLATE_FILE = "chat_template.jinja"
_CONFIG_FILE = "tokenizer_config.json"
_TOKENS_FILE = "special_tokens_map.json"


class ChatTemplate:
    """Renders conversations as the model was trained on. Keeps nothing of them."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile the template. `special_tokens`: such as ``bos_token``, by their names in it.

        Raises `jinja2.TemplateSyntaxError`.
        """
        self._template = _environment().from_string(source)
        self._special_tokens = dict(special_tokens)

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate | None:
        """Return the template of a model folder, or None if the folder holds none. Raises ConfigError."""
        config = _read_json(folder / _CONFIG_FILE)
        file = folder / _TEMPLATE_FILE
        source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
        if isinstance(source, list):  # several, by name
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if not isinstance(source, str):
            return None
        try:
            return cls(source, _special_tokens(_read_json(folder / _TOKENS_FILE) | config))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template in {folder} is not valid: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool,
    ) -> str:
        """Return the text of a conversation, ready for the model to go on with.

        `variables` are further ones for the template, by name; none can take the place of the conversation.
        Raises InvalidRequestError if the template does not take these messages.
        """
        try:
            return self._template.render(
                {
                    **self._special_tokens,
                    "tools": None,
                    "documents": None,
                    **(variables or {}),
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            RecursionError,  # what the client sent is nested too deeply to be written
        ) as error:
            raise InvalidRequestError(
                f"messages do not fit the model's chat template: {error}", param="messages"
            ) from error


class _GenerationTag(jinja2.ext.Extension):
    """The block tag ``generation``, which marks what the model said, for training: its content as it is."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes what HTML must, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens of a tokenizer's configuration, by name."""
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return content
