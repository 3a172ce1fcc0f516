from __future__ import annotations

import json
import logging
import sys

import pytest

from scheduler.observe.logs import JsonFormatter, json_line


def test_a_record_is_one_object() -> None:
    try:
        raise ValueError("broken\nin two lines")
    except ValueError:
        record = logging.LogRecord("a.b", logging.WARNING, "", 1, "to %s\n", ("é",), sys.exc_info())
    record.request_id = "r1"
    record.fields = {"status": 200}
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert line.isascii()
    entry = json.loads(line)
    assert entry["time"].endswith("+00:00")
    assert "broken" in entry.pop("exception")
    del entry["time"]
    assert entry == {
        "level": "warning",
        "logger": "a.b",
        "message": "to é\n",
        "request_id": "r1",
        "status": 200,
    }


@pytest.mark.parametrize("line", ['{"a": 1}', "{not json", "plain"])
def test_what_actors_print_becomes_json(line: str) -> None:
    entry = json.loads(json_line(line, "prefill-0"))
    if line == '{"a": 1}':
        assert entry == {"a": 1}
    else:
        assert (entry["message"], entry["actor"]) == (line, "prefill-0")
