#!/usr/bin/env bash
# Installs purefill and its test tools into .venv-test (or VENV=folder), then runs the checks.
# Needs Python 3.11 or newer and nothing else. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV:-.venv-test}
source deploy/venv.sh
make_venv "$venv" ".[test]"
# A public load generator that the API is tried with; it wants an environment of its own.
if [ ! -x .venv-aiperf/bin/aiperf ]; then
    "$(find_python)" -m venv .venv-aiperf
    .venv-aiperf/bin/python -m pip install --quiet aiperf==0.13.0
fi
PATH="$(cd "$venv/bin" && pwd):$PATH"
export PATH
exec bash tests/check.sh "$@"
