#!/usr/bin/env bash
# pip-install.sh PYTHON LOCK...: install hash-locked packages and nothing else.
#
# Packages that exist as source only are built with the locked setuptools (without isolation, which
# would fetch an unlocked one), so that is installed first.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
python=$1
shift

install() {
    "$python" -m pip install --disable-pip-version-check --no-deps --require-hashes \
        --no-build-isolation --use-pep517 "$@"
}

install --quiet -r "$here/requirements-build.lock"
locks=()
for lock in "$@"; do locks+=(-r "$lock"); done
# A second run over a nearly complete environment would print a line for each package that is there.
install "${locks[@]}" | { grep --line-buffered -v '^Requirement already satisfied' || true; }
