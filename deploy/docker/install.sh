#!/usr/bin/env bash
# Installs into a virtual environment, with the versions of deploy/constraints.txt:
#   install.sh dependencies FOLDER [TORCH_INDEX]   makes FOLDER, and installs all that purefill needs
#   install.sh purefill FOLDER                     installs purefill itself
set -euo pipefail
cd "$(dirname "$0")/../.."

what=$1 folder=$2 torch_index=${3:-}
pip=("$folder/bin/python" -m pip --disable-pip-version-check)
install=("${pip[@]}" install --no-cache-dir --constraint deploy/constraints.txt)
case $what in
    dependencies)
        python3 -m venv "$folder"
        "${install[@]}" pip 'setuptools>=77'
        if [ -n "$torch_index" ]; then
            "${install[@]}" --index-url "$torch_index" torch
        fi
        "$folder/bin/python" - <<'PYTHON' > "$folder/requirements.txt"
import tomllib
with open("pyproject.toml", "rb") as file:
    print("\n".join(tomllib.load(file)["project"]["dependencies"]))
PYTHON
        "${install[@]}" --requirement "$folder/requirements.txt"
        ;;
    purefill)
        "${install[@]}" --no-deps --no-build-isolation .
        "${pip[@]}" check
        ;;
    *)
        echo "usage: install.sh dependencies|purefill FOLDER [TORCH_INDEX]" >&2
        exit 2
        ;;
esac
