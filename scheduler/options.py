"""Where settings come from: command line, then PUREFILL_ variables, then the YAML file, then the defaults."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml

from scheduler.config import ServeConfig, unknown_name
from scheduler.errors import ConfigError
from scheduler.observe.traces import ENDPOINT_VARIABLE

_PREFIX = "PUREFILL_"
_CONFIG_VARIABLE = "PUREFILL_CONFIG"
_OTHER_VARIABLES = (_CONFIG_VARIABLE, "PUREFILL_CACHE")
"""Variables with our prefix that are no field of `ServeConfig`."""


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """Give `parser` one option for each field of `ServeConfig`, and --config. None of them has a default."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help=f"YAML file with these settings, named with underscores ({_CONFIG_VARIABLE})",
    )
    for name, field in ServeConfig.model_fields.items():
        flag, text = "--" + name.replace("_", "-"), str(field.description).replace("%", "%%")
        if field.annotation is bool:
            parser.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
            )
            continue
        if isinstance(field.default, str | int | float):
            text += f" (default: {field.default:{'g' if isinstance(field.default, float) else ''}})"
        action = "append" if get_origin(field.annotation) is tuple else "store"
        parser.add_argument(
            flag, action=action, metavar=_metavar(field.annotation), default=argparse.SUPPRESS, help=text
        )


def load_config(options: Mapping[str, object], environ: Mapping[str, str]) -> ServeConfig:
    """Return the settings, each from the first source that has it.

    `options` are the parsed ones of `add_serve_options`. An empty variable and a null in the file count as
    not set. Raises `ConfigError` for an unknown name in the file or with our prefix in `environ`, and for a
    value that `ServeConfig` refuses; the message then says which file or variable it came from.
    """
    given = dict(options)
    file = given.pop("config", None) or environ.get(_CONFIG_VARIABLE)
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    if file:
        values |= _read_file(Path(str(file)).expanduser())
        sources |= dict.fromkeys(values, f"in {file}")
    variables = _read_environment(environ)
    for name, (variable, text) in variables.items():
        values[name], sources[name] = text, f"from {variable}"
    for name, value in given.items():
        values[name] = value
        sources.pop(name, None)
    if environ.get(ENDPOINT_VARIABLE) and "otlp_endpoint" not in values:
        values["otlp_endpoint"] = environ[ENDPOINT_VARIABLE]
        sources["otlp_endpoint"] = f"from {ENDPOINT_VARIABLE}"
    return ServeConfig.model_validate(values, context=sources)


def _read_file(path: Path) -> dict[str, object]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"config file {path} must hold names and values, got {content!r:.50}")
    for name in content:
        if name not in ServeConfig.model_fields:
            raise ConfigError(unknown_name("setting", str(name), ServeConfig.model_fields) + f" (in {path})")
    return {name: value for name, value in content.items() if value is not None}


def _read_environment(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return variable and text of each field that `environ` sets."""
    fields = {_variable(name): name for name in ServeConfig.model_fields}
    found = {}
    for variable, text in environ.items():
        if not variable.startswith(_PREFIX) or variable in _OTHER_VARIABLES:
            continue
        if variable not in fields:
            raise ConfigError(unknown_name("variable", variable, [*fields, *_OTHER_VARIABLES]))
        if text:
            found[fields[variable]] = (variable, text)
    return found


def _variable(field: str) -> str:
    # Several keys fit into the one variable, hence its plural.
    return _PREFIX + ("API_KEYS" if field == "api_key" else field.upper())


def _metavar(annotation: Any) -> str:
    """Return what stands for the value in the help text."""
    if get_origin(annotation) is Literal:
        return "{" + ",".join(get_args(annotation)) + "}"
    names = {int: "N", float: "NUMBER", str: "TEXT"}
    for kind in (annotation, *get_args(annotation)):
        plain = get_args(kind)[0] if get_origin(kind) is Annotated else kind
        if plain in names:
            return names[plain]
    return "VALUE"
