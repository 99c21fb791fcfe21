#!/bin/bash
# image-packages.sh VARIANT VENV: install the locked packages for a variant. Runs in the image build.
#
# Index and certificates come from build arguments or, under BuildKit, from the secrets pip.conf and
# certificates. See docker/README.md.
set -euo pipefail
variant=$1
venv=$2
here=$(dirname "${BASH_SOURCE[0]}")

lock=$here/requirements-$variant.lock
if [ ! -f "$lock" ]; then
    echo "There is no requirements-$variant.lock. Make it with 'make lock' on a machine that reaches" \
        "Paddle's package index, then build again (or take VARIANT=cpu)." >&2
    exit 1
fi

for certificates in /run/secrets/certificates "$here/certificates.pem"; do
    if [ -s "$certificates" ]; then export PIP_CERT=$certificates; break; fi
done
[ ! -s /run/secrets/pip.conf ] || export PIP_CONFIG_FILE=/run/secrets/pip.conf
# An argument that was not given is an empty variable, which pip takes for an empty URL.
for name in PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_TRUSTED_HOST; do
    [ -n "${!name:-}" ] || unset "$name"
done
if [ "$variant" != cpu ]; then
    paddle_index=${PADDLE_INDEX:-https://www.paddlepaddle.org.cn/packages/stable}/$variant/
    export PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL:+$PIP_EXTRA_INDEX_URL }$paddle_index"
fi
export PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1 PIP_PROGRESS_BAR=off PIP_ROOT_USER_ACTION=ignore

python3.11 -m venv "$venv"
"$venv/bin/python" "$here/pip_install.py" --name packages "$here/requirements.lock" "$lock"
# The environment is what the locks say: pip made it and goes.
"$venv/bin/python" -m pip uninstall --quiet --yes pip
"$venv/bin/python" "$here/check_installed.py" "$here/requirements.lock" "$lock"
