#!/usr/bin/env bash
# The one check command: formatter, linter, types, import rules, tests. CI and people run the same.
# Runs in whatever environment `python` is; tests/run.sh makes one. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

ruff format --check .
ruff check .
mypy
lint-imports
python -m pytest -m "not gpu" "$@"
