#!/usr/bin/env bash
# The one check command: formatter, linter, types, import rules, tests. CI and people run the same.
# Runs in whatever environment `python` is; tests/run.sh makes one. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

ruff format --check .
ruff check .
mypy
lint-imports
# The reference model computes beside the service under test: waiting threads must not spin.
OMP_WAIT_POLICY=passive python -m pytest -m "not gpu" "$@"
