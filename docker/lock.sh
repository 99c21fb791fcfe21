#!/usr/bin/env bash
# Resolve docker/*.in into the hash-locked docker/*.lock. Called by `make lock`.
#
#   docker/lock.sh            keep the locked versions wherever the inputs still allow them
#   docker/lock.sh --upgrade  take the newest versions that the inputs allow
#
# The CPU and development locks need the package index only. Those of the CUDA variants need
# Paddle's own index too; where it does not answer they are left as they are, and this says so.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# One index per CUDA version: $PADDLE_INDEX/cu126/ and $PADDLE_INDEX/cu129/.
PADDLE_INDEX=${PADDLE_INDEX:-https://www.paddlepaddle.org.cn/packages/stable}
PYTHON_VERSION=3.11
PLATFORM=x86_64-manylinux_2_28

upgrade=()
case "${1:-}" in
    "") ;;
    --upgrade) upgrade=(--upgrade) ;;
    *) echo "lock.sh: unknown argument '$1'. Use --upgrade or none." >&2; exit 2 ;;
esac

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

echo "lock: installing the resolver"
python=$(./find-python.sh)
"$python" -m venv "$scratch/venv"
"$scratch/venv/bin/python" -m pip install --quiet --no-deps --require-hashes -r requirements-uv.lock
uv="$scratch/venv/bin/uv"

# uv does not read pip's settings; the user has made those once, so hand them over.
pip_setting() { "$scratch/venv/bin/python" -m pip config get "global.$1" 2>/dev/null || true; }
index=${PIP_INDEX_URL:-$(pip_setting index-url)}
certificate=${PIP_CERT:-$(pip_setting cert)}
[ -z "$index" ] || export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}
[ -z "$certificate" ] || export SSL_CERT_FILE=${SSL_CERT_FILE:-$certificate}

# compile OUTPUT.lock "INPUTS" [uv options]: the header names the inputs with their checksums, which
# tests/test_locks.py compares; uv's own header would name the index and the options.
compile() {
    local output=$1 inputs=$2
    shift 2
    local new="$scratch/$output"
    # shellcheck disable=SC2086  # a list of file names
    set -- $inputs "$@"
    [ ! -f "$output" ] || cp "$output" "$new"
    "$uv" pip compile "$@" --quiet --no-header --generate-hashes --override overrides.txt \
        --python-version "$PYTHON_VERSION" --python-platform "$PLATFORM" \
        "${upgrade[@]}" --output-file "$new" >/dev/null
    {
        echo "# Made by \`make lock\` for Python $PYTHON_VERSION on Linux x86-64. Do not edit."
        for input in $inputs overrides.txt; do
            echo "# input $input sha256:$(sha256sum "$input" | cut -d' ' -f1)"
        done
        # Where uv writes its scratch file's name as a source, keep the plain name.
        sed "s|$scratch/||g" "$new"
    } > "$new.done"
    mv "$new.done" "$output"
    echo "lock: $output: $(grep -c '^[a-z0-9].*==' "$output") packages"
}

answers() {
    "$scratch/venv/bin/python" -c \
        'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=20).close()' "$1"
}

names() { sed -n 's/^\([A-Za-z0-9._-]*\)==.*/\1/p' "$1"; }

compile requirements-uv.lock requirements-uv.in
# Paddle's own dependencies are the same for every build, so they are resolved with the CPU one.
compile requirements.lock "requirements.in requirements-cpu.in" --no-emit-package paddlepaddle
compile requirements-build.lock requirements-build.in --constraint requirements.lock
compile requirements-cpu.lock requirements-cpu.in --constraint requirements.lock --no-deps
compile requirements-dev.lock "requirements.in requirements-cpu.in requirements-dev.in" \
    --constraint requirements.lock

# What is in .venv already is taken from there.
shared=()
for name in $(names requirements.lock); do shared+=(--no-emit-package "$name"); done
compile requirements-bench.lock requirements-bench.in --constraint requirements.lock "${shared[@]}"

for variant in cu126 cu129; do
    if ! answers "$PADDLE_INDEX/$variant/" 2>"$scratch/answer"; then
        echo "lock: requirements-$variant.lock left as it is: Paddle's index for $variant does not" \
            "answer ($(tail -n 1 "$scratch/answer")). Run 'make lock' where it does, or set" \
            "PADDLE_INDEX to a mirror."
        continue
    fi
    compile "requirements-$variant.lock" "requirements-$variant.in" --constraint requirements.lock \
        --index "$PADDLE_INDEX/$variant/" --index-strategy unsafe-best-match "${shared[@]}"
done
