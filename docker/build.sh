#!/usr/bin/env bash
# Build the image fleet-recipes:VARIANT. Called by `make image`.
#
#   VARIANT   cpu, cu126 or cu129; default: by what this machine has
#   BASE      a plain Debian 12; default: the Dockerfile's, or where that cannot be pulled the one
#             that `make base` builds
#   IMAGE     the tag; default: fleet-recipes:VARIANT
#
# Taken from the user's own settings, so that a build behind a proxy or a company's certificate
# authority needs no change of the Dockerfile:
#   http_proxy, https_proxy, no_proxy              Docker's predefined build arguments
#   PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_TRUSTED_HOST, or pip's configuration
#   CA_BUNDLE, PIP_CERT, pip's "cert", SSL_CERT_FILE, REQUESTS_CA_BUNDLE: the first that is set
#   PADDLE_INDEX                                   a mirror of Paddle's own index (GPU variants)
# Under BuildKit the index and the certificates are build secrets. Docker's classic builder has none:
# there they are an argument and a file of a stage that is not shipped, and an index URL with a
# password is refused, for its history would keep it on this machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

LOCAL_BASE=fleet-recipes-base:bookworm

fail() { echo "image: $*" >&2; exit 1; }

docker info >/dev/null 2>&1 ||
    fail "no Docker engine answers. Start it, or check with 'docker info' that this user may use it."

variant=$(docker/variant.sh)
image=${IMAGE:-fleet-recipes:$variant}
lock=docker/requirements-$variant.lock
[ -f "$lock" ] || fail "there is no $lock. Make it with 'make lock' on a machine that reaches" \
    "Paddle's package index, then build again (or take VARIANT=cpu)."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# ---- what the build needs from its surroundings ----------------------------------------------------
pip_setting() {  # pip_setting VARIABLE key: from the environment or pip's configuration
    local value=${!1:-}
    [ -n "$value" ] || value=$(python3 -m pip config get "global.$2" 2>/dev/null || true)
    echo "$value"
}
index=$(pip_setting PIP_INDEX_URL index-url)
extra_index=$(pip_setting PIP_EXTRA_INDEX_URL extra-index-url)
trusted_host=$(pip_setting PIP_TRUSTED_HOST trusted-host)
certificates=${CA_BUNDLE:-$(pip_setting PIP_CERT cert)}
certificates=${certificates:-${SSL_CERT_FILE:-${REQUESTS_CA_BUNDLE:-}}}
if [ -n "$certificates" ]; then
    [ -f "$certificates" ] || fail "the certificate bundle $certificates is not a file."
    ! grep -q 'PRIVATE KEY' "$certificates" ||
        fail "$certificates holds a private key. Name a bundle of certificates only: CA_BUNDLE=…"
    echo "image: trusting $certificates while packages are fetched"
fi

options=()
for name in http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY; do
    [ -z "${!name:-}" ] || options+=(--build-arg "$name")
done
# A proxy of this machine's loopback is there for a build that shares its network.
case "${http_proxy:-}${https_proxy:-}${HTTP_PROXY:-}${HTTPS_PROXY:-}" in
    *//localhost[:/]* | *//127.*) options+=(--network host) ;;
esac

# BuildKit: through the buildx plugin, or built into a client older than 23.
buildkit=no
if [ "${DOCKER_BUILDKIT:-1}" != 0 ]; then
    client=$(docker version --format '{{.Client.Version}}')
    if docker buildx version >/dev/null 2>&1; then
        buildkit=yes
        options+=(--provenance=false)
    elif [ "${client%%.*}" -lt 23 ]; then
        buildkit=yes
    fi
fi
if [ $buildkit = no ]; then
    case "$index $extra_index" in
        *://*@*) fail "the package index's URL holds a password, which Docker's classic builder would" \
            "keep in the history of an intermediate image. Install the buildx plugin and build again." ;;
    esac
fi

# ---- the base --------------------------------------------------------------------------------------
default_base=$(sed -n 's/^ARG BASE=//p' Dockerfile | head -n 1)
have() { docker image inspect "$1" >/dev/null 2>&1; }
if [ -n "${BASE:-}" ]; then
    base=$BASE
elif have "$default_base"; then
    base=$default_base
elif have "$LOCAL_BASE"; then
    base=$LOCAL_BASE
elif echo "image: pulling $default_base" && timeout 300 docker pull --quiet "$default_base"; then
    base=$default_base
else
    echo "image: $default_base cannot be pulled; building $LOCAL_BASE from the Debian mirror instead"
    docker/base.sh
    base=$LOCAL_BASE
fi
echo "image: building $image on $base"

# ---- the context: a copy, so that nothing is put into the tree --------------------------------------
context=$scratch/context
mkdir "$context"
for name in Dockerfile .dockerignore train.py pyproject.toml README.md LICENSE conf recipes \
    benchmarks docker; do
    [ ! -e "$name" ] || cp -R "$name" "$context/"
done
rm -f "$context/docker/certificates.pem"

if [ $buildkit = yes ]; then
    export DOCKER_BUILDKIT=1
    mounts="--mount=type=secret,id=pip.conf --mount=type=secret,id=certificates"
    sed -i "s|^RUN /build/image-packages.sh|RUN $mounts /build/image-packages.sh|" \
        "$context/Dockerfile"
    (
        umask 077
        {
            echo "[global]"
            [ -z "$index" ] || echo "index-url = $index"
            [ -z "$extra_index" ] || echo "extra-index-url = $extra_index"
            [ -z "$trusted_host" ] || echo "trusted-host = $trusted_host"
        } > "$scratch/pip.conf"
        [ -z "$certificates" ] || cp -L "$certificates" "$scratch/certificates"
    )
    options+=(--secret "id=pip.conf,src=$scratch/pip.conf" --progress plain)
    [ -z "$certificates" ] || options+=(--secret "id=certificates,src=$scratch/certificates")
    echo "image: with BuildKit"
else
    export DOCKER_BUILDKIT=0
    [ -z "$index" ] || options+=(--build-arg "PIP_INDEX_URL=$index")
    [ -z "$extra_index" ] || options+=(--build-arg "PIP_EXTRA_INDEX_URL=$extra_index")
    [ -z "$trusted_host" ] || options+=(--build-arg "PIP_TRUSTED_HOST=$trusted_host")
    [ -z "$certificates" ] || cp -L "$certificates" "$context/docker/certificates.pem"
    echo "image: with Docker's classic builder (the buildx plugin is not installed)"
fi
[ -z "${PADDLE_INDEX:-}" ] || options+=(--build-arg "PADDLE_INDEX=$PADDLE_INDEX")

# ---- what the image says of itself -----------------------------------------------------------------
commit=$(git rev-parse HEAD 2>/dev/null || echo unknown)
[ "$commit" = unknown ] || [ -z "$(git status --porcelain 2>/dev/null)" ] || commit+=-modified
code=$(docker/content.sh code)
packages=$(docker/content.sh packages "$variant")
pins() { sed -n 's/^\([A-Za-z0-9._-]*==[^ ;\\]*\).*/\1/p' "$@"; }
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

docker build "${options[@]}" --tag "$image" \
    --build-arg "VARIANT=$variant" --build-arg "BASE=$base" --build-arg "VERSION=$version" \
    --build-arg "GIT_COMMIT=$commit" --build-arg "BUILD_DATE=$(date -u +%Y-%m-%dT%H:%M:%SZ)" \
    --build-arg "PACKAGES=$(pins docker/requirements.lock "$lock" | sort | tr '\n' ' ' | sed 's/ $//')" \
    --build-arg "CODE_DIGEST=$code" --build-arg "PACKAGES_DIGEST=$packages" \
    --build-arg "PADDLE=$(pins "$lock" | grep '^paddle')" \
    "$context"
echo "image: $image is ready," \
    "$(docker image inspect --format '{{.Size}}' "$image" | awk '{printf "%.2f GB", $1 / 1e9}')"
