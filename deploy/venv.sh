# Sourced by the scripts that install purefill from this checkout.

# Prints the first Python here that is 3.11 or newer; plain python3 is preferred.
find_python() {
    local python
    for python in python3 python3.13 python3.12 python3.11; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    echo "purefill needs Python 3.11 or newer" >&2
    return 1
}

# make_venv FOLDER REQUIREMENT: makes FOLDER if it is not there, and installs REQUIREMENT in editable form.
make_venv() {
    local python
    python=$(find_python)
    if [ ! -x "$1/bin/python" ]; then
        "$python" -m venv "$1"
    fi
    # The pip that a new environment brings may be too old to resume a broken download.
    "$1/bin/python" -m pip install --quiet --constraint deploy/constraints.txt pip
    # Setuptools warns of what an editable installation may confuse in general; here it is only noise.
    PYTHONWARNINGS=ignore "$1/bin/python" -m pip install --constraint deploy/constraints.txt --editable "$2"
}
