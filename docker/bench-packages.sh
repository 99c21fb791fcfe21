#!/usr/bin/env bash
# Have the packages that benchmarks compare with (docker/requirements-bench.lock) in .bench-packages,
# outside of .venv. Called by `make bench`. It costs nothing where they are there already.
#
# Index, proxy and certificates are pip's own settings (pip.conf, PIP_INDEX_URL, PIP_CERT, ...).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

LOCK=docker/requirements-bench.lock
FOLDER=.bench-packages
STAMP=$FOLDER/.lock-sha256

wanted=$(sha256sum $LOCK | cut -d' ' -f1)
[ ! -f $STAMP ] || [ "$(cat $STAMP)" != "$wanted" ] || exit 0

echo "bench: fetching NVIDIA DALI to compare with (about 400 MB, the first time)"
partial=$(mktemp -d "$FOLDER.XXXXXX")
trap 'rm -rf "$partial"' EXIT
.venv/bin/python docker/pip_install.py --name bench --log .venv/pip-bench.log --target "$partial" $LOCK
echo "$wanted" > "$partial/.lock-sha256"
rm -rf $FOLDER
mv "$partial" $FOLDER
