#!/bin/sh
# What `docker run IMAGE …` runs:
#   train.py topology=1x2 …, -m module, -c code   Python with these arguments
#   recipe=digits_resnet18 …, --help              train.py with these overrides
#   anything else (bash, python, visualdl)        that program
set -eu

case "${1:-}" in
    *.py | -[!-]*) exec python "$@" ;;
    /* | ./*) exec "$@" ;;
    *=* | "~"* | --*) exec python /workspace/train.py "$@" ;;
    *) exec "$@" ;;
esac
