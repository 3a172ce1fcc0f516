"""docs/api.md has the one table of exceptions, and it is the code's."""

from __future__ import annotations

from pathlib import Path

from scheduler.errors import RequestError

DOCS = Path(__file__).resolve().parents[4] / "docs" / "api.md"


def test_the_table_of_the_docs_is_that_of_the_code() -> None:
    rows = [line.strip("| ").split("|") for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    documented = {
        cells[0].strip("` "): tuple(cell.strip() for cell in cells[1:])
        for cells in (row for row in rows if row[0].strip("` ").endswith("Error"))
    }
    classes = RequestError.__subclasses__()
    expected = {
        cls.__name__: tuple(filter(None, (str(cls.status), cls.error_type, cls.code))) for cls in classes
    }
    assert {name: tuple(filter(None, cells)) for name, cells in documented.items()} == expected
