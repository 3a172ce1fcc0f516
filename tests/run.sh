#!/usr/bin/env bash
# Installs purefill and its test tools into .venv-test (or VENV=folder), then runs the checks.
# Needs Python 3.11 or newer and nothing else. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV:-.venv-test}
source deploy/venv.sh
make_venv "$venv" ".[test]"
PATH="$(cd "$venv/bin" && pwd):$PATH"
export PATH
exec bash tests/check.sh "$@"
