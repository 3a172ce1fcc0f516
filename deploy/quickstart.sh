#!/usr/bin/env bash
# From a bare machine with Python 3.11 or newer to a served completion: installs purefill into .venv (or
# VENV=folder), fetches the default model, starts the service, shows a completion, and serves until Ctrl-C.
# With --once it stops after the completion. PUREFILL_ variables, such as PUREFILL_PORT, set the service up.
set -euo pipefail
cd "$(dirname "$0")/.."

once=no
if [ "${1:-}" = --once ]; then
    once=yes
    shift
fi
if [ $# -gt 0 ]; then
    echo "usage: bash deploy/quickstart.sh [--once]" >&2
    exit 2
fi

venv=${VENV:-.venv}
source deploy/venv.sh
make_venv "$venv" .
"$venv/bin/purefill" models ${PUREFILL_MODEL:+"$PUREFILL_MODEL"}

"$venv/bin/purefill" serve &
service=$!
# Ctrl-C reaches the service only through this script: a shell lets its background jobs ignore it.
stop() {
    trap - EXIT INT TERM
    kill -TERM "$service" 2>/dev/null || true
    wait "$service" || true
}
trap stop EXIT
trap 'stop; exit 130' INT
trap 'stop; exit 143' TERM

"$venv/bin/python" deploy/first_completion.py "http://127.0.0.1:${PUREFILL_PORT:-8000}" "$service"
if [ "$once" = no ]; then
    echo "Serving until Ctrl-C."
    wait "$service"
fi
