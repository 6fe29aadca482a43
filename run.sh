#!/bin/sh
# Trains, samples or tests: ./run.sh --help says how. This finds a Python for data/start.py, which
# does the rest: python3, or $PYTHON where that is set, or else that of .venv.

set -eu
repo=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P)
python=${PYTHON:-python3}
of_venv=$repo/.venv/bin/python

is_new() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; }

if ! is_new "$python"; then
    if [ -n "${PYTHON-}" ] || [ ! -x "$of_venv" ] || ! is_new "$of_venv"; then
        echo "run.sh: needs a Python 3.11 or newer, which $python is not: name one:" \
            "PYTHON=/path/to/python (uv python install 3.12 gets one, uv python find 3.12 tells" \
            "where it is)" >&2
        exit 2
    fi
    python=$of_venv
fi
exec "$python" "$repo/data/start.py" "$@"
