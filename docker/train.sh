#!/usr/bin/env bash
# train.sh [--runtime local|docker|auto] train.py OVERRIDES...
#
# Run train.py in the image or in the local environment, and say which. `auto` takes the image where
# a Docker engine answers. Either is made first where it is missing. Called by `make train`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

runtime=auto
if [ "${1:-}" = --runtime ]; then
    runtime=$2
    shift 2
fi

engine_answers() { command -v docker >/dev/null 2>&1 && docker info >/dev/null 2>&1; }

case "$runtime" in
    local) reason="RUNTIME=local" ;;
    docker)
        reason="RUNTIME=docker"
        if ! engine_answers; then
            echo "train: RUNTIME=docker, but no Docker engine answers. Start it, or check with" \
                "'docker info' that this user may use it, or take RUNTIME=local." >&2
            exit 1
        fi ;;
    auto)
        if engine_answers; then runtime=docker reason="a Docker engine answers"
        else runtime=local reason="no Docker engine answers"; fi ;;
    *) echo "train: RUNTIME=$runtime is not one of local, docker, auto." >&2; exit 2 ;;
esac

if [ "$runtime" = local ]; then
    echo "train: in the local environment .venv ($reason)"
    docker/venv.sh
    exec .venv/bin/python "$@"
fi

variant=$(docker/variant.sh)
image=fleet-recipes:$variant
echo "train: in the image $image ($reason)"
# An image of other code than this checkout's would train something else than it shows.
made_of=$(docker image inspect --format \
    '{{index .Config.Labels "org.opencontainers.image.revision"}}' "$image" 2>/dev/null || true)
if [ -z "$made_of" ] || [ "$made_of" != "$(git rev-parse HEAD 2>/dev/null || echo "$made_of")" ]; then
    docker/build.sh
fi
mkdir -p outputs data
options=(--rm --shm-size=1g --user "$(id -u):$(id -g)"
    --volume "$PWD/outputs:/workspace/outputs" --volume "$PWD/data:/workspace/data")
[ "$variant" = cpu ] || options+=(--gpus all)
[ ! -t 1 ] || options+=(--tty)
exec docker run "${options[@]}" "$image" "$@"
