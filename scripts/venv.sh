#!/usr/bin/env bash
# Makes the Python environment of the tests and the demo, once per set of requirements, and prints its path.
# STRANDLINE_VENV names another folder; otherwise it lies in the user's cache, and .venv points to it.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
command -v "$python" >/dev/null || { echo "$python was not found; install Python 3.9 or newer (with venv)" >&2; exit 1; }
key=$({ cat requirements-test.txt; "$python" -c 'import sys; print(sys.version_info[:2], sys.prefix)'; } | sha256sum | cut -c1-12)
venv=${STRANDLINE_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/strandline/venv-$key}
mkdir -p "$(dirname "$venv")"
exec 9>"$venv.lock"
flock 9
if [ ! -e "$venv/.complete-$key" ]; then
    echo "making the Python environment in $venv (torch is about 3 GB; minutes, once)" >&2
    "$python" -m venv "$venv" || { echo "python -m venv failed: on Debian and Ubuntu, apt install python3-venv" >&2; exit 1; }
    "$venv/bin/python" -m pip install -q --disable-pip-version-check -r requirements-test.txt >&2
    touch "$venv/.complete-$key"
fi
ln -sfn "$venv" .venv 2>/dev/null || true
echo "$venv"
