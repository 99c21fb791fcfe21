#!/bin/sh
# What `docker run IMAGE …` runs:
#   train.py topology=1x2 …, -m module, -c code   Python with these arguments
#   recipe=digits_resnet18 …, --help              train.py with these overrides
#   anything else (bash, python, visualdl)        that program
set -eu

case "${1:-}" in
    *.py | -[!-]*) exec python "$@" ;;
    [!/.]*=* | "~"* | --*) exec python /workspace/train.py "$@" ;;
esac

# Other programs (visualdl) write to their home, which may be read-only or nobody's here. train.py
# sees to that itself, and still knows the home that it was given (recipes/home.py).
if [ ! -w "${HOME:-/}" ]; then
    for folder in /tmp /dev/shm; do
        if [ -w $folder ]; then export HOME=$folder; break; fi
    done
fi
exec "$@"
