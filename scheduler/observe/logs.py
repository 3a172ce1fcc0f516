"""The log: one line for each record, as text or as JSON."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]


class JsonFormatter(logging.Formatter):
    """Makes one JSON object of a record; what a call of the logger gives as ``extra={"fields": ...}`` is in it."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = getattr(record, "request_id", "-")
        if request_id != "-":
            entry["request_id"] = request_id
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry | getattr(record, "fields", {}), ensure_ascii=True)


def log_to_stderr(level: str, form: LogFormat, *, request_ids: logging.Filter | None = None) -> None:
    """Write the log of this process to stderr. `request_ids` gives records a `request_id`, which text lines show."""
    handler = logging.StreamHandler(sys.stderr)
    if request_ids is not None:
        handler.addFilter(request_ids)
    if form == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(
            logging.Formatter("%(message)s" if request_ids is None else "%(message)s [%(request_id)s]")
        )
    logging.basicConfig(level=level.upper(), handlers=[handler])


def say_on_stderr(logger: logging.Logger, form: LogFormat) -> None:
    """Write what a logger says to stderr, whatever the level of the log: news of the service itself."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter("purefill: %(message)s"))
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def relay_actor_logs() -> None:
    """Print what actors write as it is. Ray puts name and process before each line, which is no JSON then.

    Lines that are no JSON, such as what a library prints, become an object with the actor's name.
    """
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    dispatcher.remove_handler("ray_print_logs")
    dispatcher.add_handler("purefill_json_logs", _relay)


def _relay(batch: Mapping[str, Any]) -> None:
    if batch.get("pid") in ("autoscaler", "raylet"):
        return  # Ray itself: what it has to say is in its own files.
    lines = [json_line(line, batch.get("actor_name")) for line in batch["lines"]]
    print("\n".join(lines), file=sys.stderr, flush=True)


def json_line(line: str, actor: str | None) -> str:
    """Return a line of an actor's output as JSON: itself, if it is an object."""
    if line.startswith("{"):
        try:
            json.loads(line)
        except ValueError:
            pass
        else:
            return line
    return json.dumps({"level": "info", "actor": actor, "message": line}, ensure_ascii=True)
