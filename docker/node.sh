#!/usr/bin/env bash
# node.sh train.py OVERRIDES...     run one node's part of a job on this machine
# node.sh --check                   print what this machine has for it, one fact a line
#
# For docker/cluster.sh and docker/slurm.sbatch. However this script is asked to end (SIGTERM,
# SIGINT, SIGHUP, or a lease that is not renewed), the run gets SIGTERM, the seconds of its
# deadlines.grace= and one more to write its last checkpoint, and then goes by force; no process and
# no container is left.
#
#   RUNTIME        docker (default), or local: the environment of a checkout
#   IMAGE          default: fleet-recipes:VARIANT, VARIANT being cu126 where there is a GPU, else cpu
#   CLUSTER_DIR    docker: the folder that gets outputs/ and data/ (default: fleet-recipes, in the
#                  home folder); local: the checkout (default: the current folder)
#   DATA           docker: the folder seen as data/ (default: CLUSTER_DIR/data)
#   PYTHON         local: default .venv/bin/python, in CLUSTER_DIR
#   SHM_SIZE       docker: of /dev/shm (default: 8g)
#   NAME           docker: of the container
#   LEASE_SECONDS  where set, the end comes when standard input brings no line for so long
set -euo pipefail

GRACE_SECONDS=10  # where the arguments do not say deadlines.grace=
# What train.py or the libraries below it read from the environment.
PASSED='^(NCCL_|GLOO_|FLAGS_|SLURM_(NODEID|STEP_TASKS_PER_NODE|(STEP|JOB)_NODELIST)$|PADDLE_(RANK|MASTER)$|MASTER_(ADDR|PORT)$|(GROUP|NODE)_RANK$|JOB_COMPLETION_INDEX$|FLEET_RECIPES_SECRET$|OMP_NUM_THREADS$)'

has_gpu() {
    [ -e /dev/nvidiactl ] ||
        { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi --list-gpus 2>/dev/null | grep -q GPU; }
}

choose_image() {
    if [ -z "${VARIANT:-}" ]; then
        if has_gpu; then VARIANT=cu126; else VARIANT=cpu; fi
    fi
    echo "${IMAGE:-fleet-recipes:$VARIANT}"
}

# ---- what this machine has -------------------------------------------------------------------------
print_facts() {
    local answer folder python
    read -r -a connection <<< "${SSH_CONNECTION:-}"
    echo "client ${connection[0]:-}"
    echo "server ${connection[2]:-}"
    if [ "${RUNTIME:-docker}" = local ]; then
        folder=${CLUSTER_DIR:-.}
        python=${PYTHON:-.venv/bin/python}
        if ! cd "$folder" 2>/dev/null; then echo "folder missing"
        elif [ ! -e train.py ]; then echo "folder empty"
        else echo "folder ok"; fi
        if "$python" -c '' >/dev/null 2>&1; then echo "python ok"; else echo "python missing"; fi
        return
    fi
    if has_gpu; then echo "gpu yes"; else echo "gpu no"; fi
    if ! command -v docker >/dev/null 2>&1; then
        echo "docker missing"
        return
    fi
    if ! answer=$(timeout 15 docker version --format '{{.Server.Version}}' 2>&1); then
        echo "docker silent ${answer//$'\n'/ }"
        return
    fi
    echo "docker ok"
    IMAGE=$(choose_image)
    echo "name $IMAGE"
    answer=$(timeout 15 docker image inspect --format '{{.Id}}' "$IMAGE" 2>/dev/null) || answer=
    echo "image $answer"
    answer=$(timeout 15 docker image inspect "$IMAGE" \
        --format '{{index .Config.Labels "fleet-recipes.code-digest"}}' 2>/dev/null) || answer=
    echo "code $answer"
}

# ---- one node's part -------------------------------------------------------------------------------
run_in_checkout() {
    cd "${CLUSTER_DIR:-.}"
    exec "${PYTHON:-.venv/bin/python}" "$@"
}

run_in_docker() {
    local folder=${CLUSTER_DIR:-$HOME/fleet-recipes} gpus variable
    local options=(--rm --name "$NAME" --network host --shm-size "${SHM_SIZE:-8g}"
        --user "$(id -u):$(id -g)")
    mkdir -p "$folder/outputs" "${DATA:-$folder/data}"
    options+=(--volume "$(realpath "$folder")/outputs:/workspace/outputs"
        --volume "$(realpath "${DATA:-$folder/data}"):/workspace/data"
        --env "FLEET_RECIPES_HOST_OUTPUTS=$(realpath "$folder")/outputs")
    if has_gpu; then
        # A batch system may have given only some of them to this job.
        gpus=${SLURM_STEP_GPUS:-${SLURM_JOB_GPUS:-}}
        if [ -n "$gpus" ]; then options+=(--gpus "\"device=$gpus\""); else options+=(--gpus all); fi
    fi
    if [ -d /dev/infiniband ]; then
        options+=(--device /dev/infiniband --ulimit memlock=-1 --cap-add IPC_LOCK)
    fi
    for variable in $(compgen -e); do
        [[ ! $variable =~ $PASSED ]] || options+=(--env "$variable")
    done
    exec docker run "${options[@]}" "$(choose_image)" "$@"
}

read_grace() {  # read_grace ARGUMENTS...
    local argument
    for argument in "$@"; do
        [[ ! $argument =~ ^\+*deadlines\.grace=([0-9]+) ]] || GRACE_SECONDS=$((BASH_REMATCH[1] + 1))
    done
}

# shellcheck disable=SC2317  # called by a trap
end_run() {
    trap '' TERM INT HUP
    ending=yes
    if [ "$RUNTIME" = docker ]; then
        timeout $((GRACE_SECONDS + 20)) docker stop --time "$GRACE_SECONDS" "$NAME" >/dev/null 2>&1 || true
    fi
    kill -TERM "$child" 2>/dev/null || true  # of Docker, its client: the container may be under way
    for ((tenths = 0; tenths < GRACE_SECONDS * 10; tenths++)); do
        kill -0 "$child" 2>/dev/null || break
        sleep 0.1
    done
    kill -KILL "$child" 2>/dev/null || true
    if [ "$RUNTIME" = docker ]; then
        timeout 30 docker rm --force "$NAME" >/dev/null 2>&1 || true
    fi
}

watch_lease() {
    while read -r -t "$LEASE_SECONDS" _; do :; done
    kill -TERM $$
}

run_node() {
    local status=0 watcher='' ending=''
    RUNTIME=${RUNTIME:-docker}
    NAME=${NAME:-fleet-recipes-$$}
    read_grace "$@"
    # Only the end of the run counts, not whether somebody still reads what it says.
    trap '' PIPE
    case "$RUNTIME" in
        docker) run_in_docker "$@" & ;;
        local) run_in_checkout "$@" & ;;
        *) echo "node: RUNTIME=$RUNTIME is not one of docker, local." >&2; exit 2 ;;
    esac
    child=$!
    trap end_run TERM INT HUP
    if [ -n "${LEASE_SECONDS:-}" ]; then
        watch_lease <&0 >/dev/null 2>&1 &
        watcher=$!
    fi
    wait "$child" || status=$?
    if [ -n "$ending" ]; then  # the signal cut the wait short, and the run has ended since
        status=0
        wait "$child" || status=$?
    fi
    [ -z "$watcher" ] || kill "$watcher" 2>/dev/null || true
    exit "$status"
}

# On one line with its exit: cluster.sh sends this file to a shell's standard input.
if [ "${1:-}" = --check ]; then print_facts; else run_node "$@"; fi; exit
