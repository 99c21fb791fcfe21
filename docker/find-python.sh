#!/usr/bin/env bash
# Print a Python 3.11 that can make virtual environments, or say what is missing.
#   PYTHON=/path/to/python3.11 names one outright.
set -euo pipefail

is_311() {
    command -v "$1" >/dev/null 2>&1 &&
        "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1
}

candidates=(python3.11 python3 python)
if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi

for candidate in "${candidates[@]}"; do
    is_311 "$candidate" || continue
    if ! "$candidate" -c 'import venv, ensurepip' >/dev/null 2>&1; then
        echo "$(command -v "$candidate") has no venv module." \
            "On Debian or Ubuntu: apt-get install python3.11-venv" >&2
        exit 1
    fi
    command -v "$candidate"
    exit 0
done

found=""
for candidate in "${candidates[@]}"; do
    found+=" $candidate: $("$candidate" --version 2>/dev/null || echo "not there");"
done
echo "Python 3.11 is needed and was not found (${found# })." \
    "On Debian 12: apt-get install python3.11 python3.11-venv." \
    "Elsewhere: pyenv install 3.11, or your system's package." \
    "If it is installed in an unusual place: make setup PYTHON=/path/to/python3.11" >&2
exit 1
