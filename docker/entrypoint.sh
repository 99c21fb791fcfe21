#!/bin/sh
# What `docker run IMAGE …` runs:
#   train.py topology=1x2 …, -m module, -c code   Python with these arguments
#   anything else (bash, python, visualdl)        that program
set -eu

for folder in outputs data; do
    if [ -e "$folder" ] && [ ! -w "$folder" ]; then
        echo "entrypoint: /workspace/$folder belongs to uid $(stat -c %u "$folder") and cannot be" \
            "written by uid $(id -u). If the run writes there (data may stay read-only), add" \
            "--user \"\$(id -u):\$(id -g)\" to docker run, so that its files belong to you." >&2
    fi
done

case "${1:-}" in
    *.py | -*) exec python "$@" ;;
    *) exec "$@" ;;
esac
