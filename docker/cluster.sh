#!/usr/bin/env bash
# cluster.sh HOSTS train.py topology=2x4 OVERRIDES...
#
# Run one job on several machines over SSH, from this one. HOSTS is a file with a machine a line, as
# ssh knows it: [user@]host[:port], or a name of ~/.ssh/config. Blank lines and what follows a # do
# not count. The first is node 0. Nothing but ssh, bash and Docker is needed on the machines.
#
#   RUNTIME          docker (default): in IMAGE; local: in the checkout at CLUSTER_DIR with its .venv
#   IMAGE, VARIANT, CLUSTER_DIR, DATA, PYTHON, SHM_SIZE    see docker/node.sh; the same on every host.
#                    CLUSTER_DIR is taken from the home folder there where it is relative. With
#                    RUNTIME=local it is by default this checkout's path.
#   NCCL_*, GLOO_*, FLAGS_*                 where they are set here they are set on the hosts too
#   CONNECT_SECONDS  how long a host may take to answer (default: 10)
#   FLEET_RECIPES_SECRET   by which the hosts know each other (default: a fresh one for each run); it
#                    goes to them over SSH, and is not seen in ps or in a log
#   LINGER_SECONDS   once a host has ended, how long the others may take (default: 90)
#   SSH              the ssh command (default: ssh), such as "ssh -F my.conf"
#
# Where node 0 is: topology.master=HOST[:PORT] if it is given, else the address by which this machine
# reaches it. Node 0's console is shown, and warnings and errors of the others; everything each host
# says is in outputs/cluster-TIME/HOST.log. Ctrl-C ends the run on every host, and so does the loss of
# a connection. The exit status is that of the first host that fails.
set -euo pipefail

BEAT_SECONDS=2
export LEASE_SECONDS=20

say() { echo "cluster: $*" >&2; }
fail() { say "$@"; exit 2; }

[ "${BASH_VERSINFO[0]}" -ge 4 ] || fail "this is bash $BASH_VERSION; 4 or newer is needed"
[ $# -ge 2 ] || fail "usage: docker/cluster.sh HOSTS train.py topology=2x4 OVERRIDES..."
hosts_file=$1
shift
[ -f "$hosts_file" ] || fail "there is no host file $hosts_file: write a machine a line, node 0 first"
node_script=$(dirname "${BASH_SOURCE[0]}")/node.sh
RUNTIME=${RUNTIME:-docker}
case "$RUNTIME" in
    docker) ;;
    local) CLUSTER_DIR=${CLUSTER_DIR:-$(cd "$(dirname "$node_script")/.." && pwd)} ;;
    *) fail "RUNTIME=$RUNTIME is not one of docker, local" ;;
esac
connect_seconds=${CONNECT_SECONDS:-10}
linger_seconds=${LINGER_SECONDS:-90}
read -ra ssh <<< "${SSH:-ssh}"
# A connection of its own for each, so that its end is the run's.
ssh+=(-T -o BatchMode=yes -o ConnectTimeout="$connect_seconds" -o ControlPath=none
    -o ServerAliveInterval=5 -o ServerAliveCountMax=4)

# ---- the hosts -------------------------------------------------------------------------------------
hosts=()
while read -r line || [ -n "$line" ]; do
    line=${line%%#*}
    read -r host rest <<< "$line" || true
    [ -n "$host" ] || continue
    [ -z "$rest" ] || fail "$hosts_file: '$host $rest' is not one host: [user@]host[:port]"
    [[ " ${hosts[*]} " != *" $host "* ]] || fail "$hosts_file names $host twice"
    hosts+=("$host")
done < "$hosts_file"
[ ${#hosts[@]} -gt 0 ] || fail "$hosts_file names no host"

nodes=
master=
for argument in "$@"; do
    case "$argument" in
        topology=*[xX]*) nodes=${argument#topology=} nodes=${nodes%%[xX]*} ;;
        topology.nodes=*) nodes=${argument#topology.nodes=} ;;
        topology.master=*) master=${argument#topology.master=} ;;
        topology.node_rank=*) fail "leave $argument out: the order in $hosts_file numbers the nodes" ;;
    esac
done
if [ -n "$nodes" ] && [ "$nodes" != ${#hosts[@]} ]; then
    fail "the topology has $nodes nodes, but $hosts_file names ${#hosts[@]} hosts"
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

connect() {  # connect HOST ARGUMENTS...: run bash there, which reads its standard input
    local host=$1 port=()
    shift
    trap '' INT HUP  # this script hears of them, and ends what runs on the host in good order
    if [[ $host == *:* ]]; then port=(-p "${host##*:}"); fi
    exec "${ssh[@]}" "${port[@]}" -- "${host%:*}" bash -s -- "$@"
}

# The settings, for the shell on a host.
print_settings() {
    local name
    for name in RUNTIME IMAGE VARIANT CLUSTER_DIR DATA PYTHON SHM_SIZE NAME LEASE_SECONDS \
        $(compgen -e | grep -E '^(NCCL|GLOO|FLAGS)_'); do
        [ -z "${!name:-}" ] || printf 'export %s=%q\n' "$name" "${!name}"
    done
}

# ---- checks: every host, all at once ---------------------------------------------------------------
fact() { sed -n "s/^$2 //p" "$scratch/facts.$1"; }

explain_ssh() {  # explain_ssh NODE STATUS: why there was no answer, and what to do
    local host=${hosts[$1]} words
    words=$(grep -v '^Warning: Permanently added' "$scratch/errors.$1" | tail -n 1 | tr -d '\r')
    case "$2 $words" in
        124*) words="no answer within $((connect_seconds + 20)) s. See that the machine is well" ;;
        *'Permission denied'*) words+=". Let its account know your key: ssh-copy-id $host" ;;
        *'Host key verification failed'* | *'IDENTIFICATION HAS CHANGED'*)
            words+=". Connect once by hand and look at its key: ssh $host" ;;
        *'Could not resolve'*) words+=". Mend the name in $hosts_file, or give an address" ;;
        *refused*) words+=". See that sshd runs there, on that port" ;;
        *'timed out'* | *'No route'* | *unreachable*)
            words+=". See that the machine is on and that its network can be reached" ;;
        *'bash: '* | *'not found'*) words+=". bash is needed there" ;;
        *) words="${words:-ssh ended with status $2}. Try: ssh $host true" ;;
    esac
    echo "cannot be reached: $words"
}

explain_facts() {  # explain_facts NODE: what the host lacks; nothing if it is ready
    local host=${hosts[$1]} name image
    if [ "$RUNTIME" = local ]; then
        case "$(fact "$1" folder)" in
            missing) echo "has no folder $CLUSTER_DIR. Clone the repository there, or give CLUSTER_DIR=" ;;
            empty) echo "has no train.py in $CLUSTER_DIR. Clone the repository there, or give CLUSTER_DIR=" ;;
            *) [ "$(fact "$1" python)" = ok ] ||
                echo "has no working ${PYTHON:-.venv/bin/python} in $CLUSTER_DIR. Run 'make setup' there" ;;
        esac
        return
    fi
    case "$(fact "$1" docker)" in
        ok) ;;
        missing) echo "has no docker command. Install Docker there, or take RUNTIME=local"; return ;;
        *) echo "has a Docker engine that does not answer: $(fact "$1" docker | cut -d' ' -f2-)." \
            "Start it, and see that its account may use it"; return ;;
    esac
    name=$(fact "$1" name)
    image=$(fact "$1" image)
    if [ -z "$image" ]; then
        echo "has no image $name. Make it on one host (make image) and copy it:" \
            "docker save $name | ssh $host docker load"
    elif [ "$1" != 0 ] && [ -n "$(fact 0 image)" ] && [ "$image" != "$(fact 0 image)" ]; then
        echo "has another image than ${hosts[0]}: $name ${image:0:19} instead of $(fact 0 name)" \
            "$(fact 0 image | cut -c1-19). Copy that one:" \
            "ssh ${hosts[0]} docker save $(fact 0 name) | ssh $host docker load"
    fi
}

say "looking at ${#hosts[@]} hosts"
checks=()
for node in "${!hosts[@]}"; do
    {
        # Not 'timeout': not every machine that has ssh and bash has it.
        { print_settings; cat "$node_script"; } > "$scratch/check.$node"
        connect "${hosts[node]}" --check < "$scratch/check.$node" \
            > "$scratch/facts.$node" 2> "$scratch/errors.$node"
    } &
    checks[node]=$!
done
ends=$((SECONDS + connect_seconds + 20))
problems=0
for node in "${!hosts[@]}"; do
    status=0
    while kill -0 "${checks[node]}" 2>/dev/null && [ $SECONDS -lt $ends ]; do sleep 0.1; done
    if kill "${checks[node]}" 2>/dev/null; then
        wait "${checks[node]}" || true
        status=124
    else
        wait "${checks[node]}" || status=$?
    fi
    if [ $status = 0 ]; then problem=$(explain_facts "$node")
    else problem=$(explain_ssh "$node" $status); fi
    if [ -n "$problem" ]; then
        say "${hosts[node]} (node $node) $problem"
        problems=$((problems + 1))
    fi
done
[ $problems = 0 ] || exit 2

if [ "$RUNTIME" = docker ]; then
    IMAGE=$(fact 0 name)
    say "image $IMAGE $(fact 0 image | cut -c1-19) on every host"
    [ "$(fact 0 code)" = "$("$(dirname "$node_script")/content.sh" code)" ] ||
        say "what runs is the image's code, and this checkout's differs: to run it, make image again" \
            "and copy it, or take RUNTIME=local"
fi
if [ -z "$master" ] && [ ${#hosts[@]} -gt 1 ]; then
    master=$(fact 0 server)
    case "$master" in
        # Node 0 is this machine: the address by which it comes to another.
        127.* | ::1) master=$(fact 1 client) ;;
    esac
    [[ $master =~ ^[0-9.]+$ ]] ||
        fail "node 0 (${hosts[0]}) is reached at '$master', which is no IPv4 address:" \
            "give topology.master=HOST, as the other hosts reach it"
    set -- "$@" "topology.master=$master"
fi

# ---- the run ---------------------------------------------------------------------------------------
run_id=$(date +%Y%m%d-%H%M%S)-$$
logs=outputs/cluster-$run_id
secret=${FLEET_RECIPES_SECRET:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
mkdir -p "$logs"
mkfifo "$scratch/console"
: > "$scratch/running"

print_script() {  # print_script NODE ARGUMENTS...: what the shell on a host reads, and then beats
    local node=$1 arguments
    shift
    trap '' INT HUP
    exec 4>&-
    arguments=("$@")
    [ ${#hosts[@]} = 1 ] || arguments+=("topology.node_rank=$node")
    export NAME=fleet-recipes-$run_id-node$node
    print_settings
    printf 'export FLEET_RECIPES_SECRET=%q\n' "$secret"
    printf 'set --'
    printf ' %q' "${arguments[@]}"
    echo
    cat "$node_script"
    # The lease of the host's part: it ends where these stop, for whatever reason.
    while [ -e "$scratch/running" ] && kill -0 $$ 2>/dev/null; do
        echo beat 2>/dev/null || exit 0
        sleep "$BEAT_SECONDS"
    done
}

collect() {  # collect NODE STREAM: into the host's log, and to the console
    local line
    trap '' INT HUP
    while IFS= read -r line || [ -n "$line" ]; do
        printf '%s\n' "$line" >> "$logs/$(log_name "$1")"
        printf '%s %s %s\n' "$1" "$2" "$line" >&4
    done
}

log_name() { echo "${hosts[$1]//[^A-Za-z0-9@._-]/_}.log"; }

show() {  # what a person at this console should see
    local node stream line
    declare -A shown
    trap '' INT HUP
    while IFS= read -r line; do
        node=${line%% *} line=${line#* }
        stream=${line%% *} line=${line#* }
        if [ "$node$stream" != 0out ]; then
            [ "$stream" = err ] || [[ $line == *' warning: '* || $line == *' error: '* ]] || continue
            # Every node reports the failure that ended the job; once is enough here.
            [ "${shown["x$line"]:-$node}" = "$node" ] || continue
            shown["x$line"]=$node
        fi
        [[ $line =~ ^\[node[0-9] ]] || line="${hosts[node]}: $line"
        if [ "$stream" = err ]; then printf '%s\n' "$line" >&2; else printf '%s\n' "$line"; fi
    done
}

show < "$scratch/console" &
console=$!
exec 4> "$scratch/console"

say "starting $* on ${#hosts[@]} hosts; what each says is in $logs"
runs=()
for node in "${!hosts[@]}"; do
    connect "${hosts[node]}" < <(print_script "$node" "$@") \
        > >(collect "$node" out) 2> >(collect "$node" err) 4>&- &
    runs[node]=$!
done

grace=9
for argument in "$@"; do
    [[ ! $argument =~ ^\+*deadlines\.grace=([0-9]+) ]] || grace=${BASH_REMATCH[1]}
done
stopping=
received=
stop() {  # stop REASON: end the run everywhere, in good order; a second call by force
    if [ -z "$stopping" ]; then
        say "$1: ending the run on every host"
        rm -f "$scratch/running"
        stopping=$((SECONDS + 36 + grace))
    else
        stopping=$SECONDS
    fi
}
trap 'received=${received:-130}; stop "interrupted"' INT
trap 'received=${received:-143}; stop "asked to end"' TERM
trap 'received=${received:-129}; stop "the terminal has gone"' HUP

result=0
deadline=
while [ ${#runs[@]} -gt 0 ]; do
    sleep 0.3 || true  # a signal may end it
    for node in "${!runs[@]}"; do
        if kill -0 "${runs[node]}" 2>/dev/null; then
            [ -z "$stopping" ] || [ $SECONDS -lt "$stopping" ] || kill -KILL "${runs[node]}" || true
            continue
        fi
        status=0
        wait "${runs[node]}" || status=$?
        unset "runs[node]"
        deadline=${deadline:-$((SECONDS + linger_seconds))}
        if [ $status = 255 ]; then say "${hosts[node]} (node $node): the connection broke"
        elif [ $status != 0 ]; then say "${hosts[node]} (node $node) ended with exit status $status"; fi
        [ $result != 0 ] || result=$status
    done
    if [ -z "$stopping" ] && [ -n "$deadline" ] && [ $SECONDS -ge "$deadline" ] &&
        [ ${#runs[@]} -gt 0 ]; then
        stop "$linger_seconds s after the first host's end others still run"
        [ $result != 0 ] || result=1
    fi
done

exec 4>&-
wait "$console" || true
exit "${received:-$result}"
