#!/usr/bin/env bash
# train.sh [--runtime local|docker|auto] train.py OVERRIDES...
#
# Run train.py of this checkout in the image or in the local environment, and say which. `auto` takes
# the image where a Docker engine answers and the image is there or can be made, else .venv; either is
# made first where it is missing. Called by `make train`.
#
# In the image the checkout runs as it is: code that differs from what the image was made of is
# mounted over it, and an image of other packages is built anew.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

runtime=auto
if [ "${1:-}" = --runtime ]; then
    runtime=$2
    shift 2
fi
started_with="docker/train.sh --runtime $runtime" # for the command that goes on with a run

engine_answers() { command -v docker >/dev/null 2>&1 && timeout 30 docker info >/dev/null 2>&1; }

label() { docker image inspect --format "{{index .Config.Labels \"$1\"}}" "$image" 2>/dev/null || true; }

run_locally() {  # run_locally REASON ARGUMENTS...
    echo "train: in the local environment .venv ($1)"
    shift
    docker/venv.sh
    FLEET_RECIPES_STARTED_WITH=$started_with exec .venv/bin/python "$@"
}

ensure_image() {  # an image of this checkout's packages
    local made_of
    made_of=$(label fleet-recipes.packages-digest)
    [ "$made_of" != "$(docker/content.sh packages "$variant" 2>/dev/null)" ] || return 0
    [ -z "$made_of" ] || echo "train: $image has other packages than this checkout: building it anew"
    IMAGE=$image docker/build.sh
}

set_options() {  # of docker run, and in words what runs
    local user path commit
    user=$(id -u):$(id -g)
    # Where Docker runs without root, its root is the caller.
    case "$(docker info --format '{{.SecurityOptions}}' 2>/dev/null)" in *rootless*) user=0:0 ;; esac
    options=(--rm --shm-size=1g --user "$user"
        --volume "$PWD/outputs:/workspace/outputs" --volume "$PWD/data:/workspace/data"
        --env "FLEET_RECIPES_HOST_OUTPUTS=$PWD/outputs"
        --env "FLEET_RECIPES_STARTED_WITH=$started_with")
    [ "$variant" = cpu ] || options+=(--gpus all)
    what="made of this checkout"
    [ "$(label fleet-recipes.code-digest)" != "$(docker/content.sh code)" ] || return 0
    what="the checkout's code mounted over that of $(label org.opencontainers.image.revision | cut -c1-9)"
    for path in $(docker/content.sh mounts); do
        options+=(--volume "$PWD/$path:/workspace/$path:ro")
    done
    if commit=$(git rev-parse HEAD 2>/dev/null); then
        [ -z "$(git status --porcelain 2>/dev/null)" ] || commit+=-modified
        options+=(--env "FLEET_RECIPES_COMMIT=$commit")
    fi
}

try_image() {  # make it, and see that a container of it starts; what is said stays in $log
    { ensure_image && set_options && docker run "${options[@]}" "$image" -c pass; } 2>&1 | tee "$log"
}

case "$runtime" in
    local) run_locally RUNTIME=local "$@" ;;
    docker)
        if ! engine_answers; then
            echo "train: RUNTIME=docker, but no Docker engine answers. Start it, or check with" \
                "'docker info' that this user may use it, or take RUNTIME=local." >&2
            exit 1
        fi ;;
    auto) engine_answers || run_locally "no Docker engine answers" "$@" ;;
    *) echo "train: RUNTIME=$runtime is not one of local, docker, auto." >&2; exit 2 ;;
esac

trap 'exit 130' INT
variant=$(docker/variant.sh)
image=fleet-recipes:$variant
mkdir -p outputs data
if [ "$runtime" = docker ]; then
    ensure_image
else
    log=$(mktemp)
    if ! try_image; then
        reason=$(grep -v '^[[:space:]]*$' "$log" | tail -n 1 || true)
        rm -f "$log"
        run_locally "the image cannot be had: ${reason:-docker run failed}" "$@"
    fi
    rm -f "$log"
fi
trap - INT
set_options
[ ! -t 1 ] || options+=(--tty)
echo "train: in the image $image, $what"
exec docker run "${options[@]}" "$image" "$@"
