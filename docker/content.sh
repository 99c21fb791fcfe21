#!/usr/bin/env bash
# content.sh code               print a digest of the code that an image of this tree carries
# content.sh packages VARIANT   print a digest of all else that it is made of: system, packages
# content.sh mounts             print what is mounted over the image's code, one path a line
#
# build.sh leaves both digests in the image's labels; train.sh compares them, so that what runs is the
# checkout as it is, committed or not.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

CODE=(train.py pyproject.toml conf recipes benchmarks docker/entrypoint.sh)
PACKAGES=(Dockerfile .dockerignore docker/requirements.lock docker/requirements-build.lock
    docker/image-packages.sh docker/pip_install.py docker/check_installed.py docker/trim.sh
    docker/describe_packages.py docker/describe_image.py)

digest() {
    find "$@" \( -name '__pycache__' -o -name '.*_cache' -o -path benchmarks/results \) -prune \
        -o -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -c1-16
}

case "${1:-}" in
    code) digest "${CODE[@]}" ;;
    packages) digest "${PACKAGES[@]}" "docker/requirements-${2:?which variant?}.lock" ;;
    mounts) printf '%s\n' "${CODE[@]}" ;;
    *) echo "content.sh: '${1:-}' is not one of code, packages, mounts." >&2; exit 2 ;;
esac
