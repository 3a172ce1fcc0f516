#!/usr/bin/env bash
# Installs purefill and its test tools into .venv-test (or VENV=folder), then runs the checks.
# Needs Python 3.11 or newer and nothing else. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV:-.venv-test}
source deploy/venv.sh
# A public load generator that the API is tried with; it wants an environment of its own, which is made meanwhile.
make_aiperf() {
    [ -x .venv-aiperf/bin/aiperf ] && return
    "$(find_python)" -m venv .venv-aiperf
    .venv-aiperf/bin/python -m pip install --quiet aiperf==0.13.0
}
make_aiperf &
aiperf=$!
make_venv "$venv" ".[test]"
wait "$aiperf"
PATH="$(cd "$venv/bin" && pwd):$PATH"
export PATH
exec bash tests/check.sh "$@"
