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
# Tests of a running service wait most of the time, so two runs share the cores: one of the tests that share a service,
# and one of all others, which is shown afterwards. Those of tokens compute the most and come first, those of the death of
# processes come last: least is beside them then.
own=(tests/integration/test_{api_server,cost_model,decode_pools,tensor_parallel,recovery,chaos}.py)
shared=(tests/integration/test_tokens.py)
for file in tests/integration/test_*.py; do
    case " ${own[*]} ${shared[*]} " in *" $file "*) ;; *) shared+=("$file") ;; esac
done
log=$(mktemp)
python -m pytest -m "not gpu" --durations=10 tests/unit tests/conformance "${own[@]}" > "$log" 2>&1 &
others=$!
trap 'kill "$others" 2> /dev/null || true; rm -f "$log"' EXIT
status=0
python -m pytest -m "not gpu" --durations=10 "${shared[@]}" || status=$?
wait "$others" || status=$?
cat "$log"
exit "$status"
