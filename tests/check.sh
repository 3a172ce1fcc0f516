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
export OMP_WAIT_POLICY=passive
if [ $# -gt 0 ]; then
    exec python -m pytest -m "not gpu" "$@"
fi
# Tests of a running service wait most of the time: the unit tests run meanwhile, and are shown afterwards.
unit_log=$(mktemp)
python -m pytest -m "not gpu" tests/unit > "$unit_log" 2>&1 &
unit=$!
trap 'kill "$unit" 2> /dev/null || true; rm -f "$unit_log"' EXIT
status=0
python -m pytest -m "not gpu" tests/conformance tests/integration || status=$?
wait "$unit" || status=$?
cat "$unit_log"
exit "$status"
