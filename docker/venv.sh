#!/usr/bin/env bash
# Make the local environment .venv from docker/requirements-dev.lock, or bring it up to date.
# Called by `make setup`. It costs nothing where .venv already holds what the lock says; one that
# was left half-made, or whose Python has gone, is made again.
#
# Index, proxy and certificates are pip's own settings (pip.conf, PIP_INDEX_URL, PIP_CERT, ...).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

LOCK=docker/requirements-dev.lock
BUILD_LOCK=docker/requirements-build.lock
VENV=.venv
STAMP=$VENV/.lock-sha256         # the locks that this environment equals
INCOMPLETE=$VENV/.incomplete     # there while an installation is under way

wanted=$(cat "$BUILD_LOCK" "$LOCK" | sha256sum | cut -d' ' -f1)

usable() { [ -x $VENV/bin/python ] && $VENV/bin/python -m pip --version >/dev/null 2>&1; }

if [ -f $STAMP ] && [ ! -e $INCOMPLETE ] && [ "$(cat $STAMP)" = "$wanted" ] &&
    $VENV/bin/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
    exit 0
fi

if [ -e $INCOMPLETE ] || ! usable; then
    python=$(docker/find-python.sh)
    [ ! -e $VENV ] || echo "setup: $VENV is incomplete or broken; making it again"
    echo "setup: making $VENV with $("$python" --version)"
    "$python" -m venv --clear $VENV
fi

echo "setup: installing $(grep -c '^[a-z0-9].*==' $LOCK) packages from $LOCK (about 500 MB to" \
    "fetch the first time)"
rm -f $STAMP
touch $INCOMPLETE
$VENV/bin/python docker/pip_install.py --name setup --log $VENV/pip.log $LOCK
# What an older lock brought and this one does not name goes, so that .venv equals the lock.
$VENV/bin/python docker/check_installed.py --list-extra $LOCK | while read -r extra; do
    echo "setup: removing $extra, which the lock does not name"
    $VENV/bin/python -m pip uninstall --quiet --yes "$extra"
done
$VENV/bin/python docker/check_installed.py $LOCK
echo "$wanted" > $STAMP
rm -f $INCOMPLETE
echo "setup: $VENV is ready"
