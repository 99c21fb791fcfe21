#!/usr/bin/env bash
# Build fleet-recipes-base:bookworm, a plain Debian 12, from a Debian mirror. Called by `make base`;
# `make image` uses it where the registry's Debian image cannot be pulled.
#
#   DEBIAN_MIRROR           default: debootstrap's own
#   DEBIAN_SECURITY_MIRROR  default: DEBIAN_MIRROR with -security appended
#   http_proxy              as usual
set -euo pipefail

SUITE=bookworm
TAG=fleet-recipes-base:$SUITE

PATH=$PATH:/usr/sbin:/sbin
have_debootstrap() { [ -x "$(command -v debootstrap)" ]; }

install_debootstrap() {  # as root on Debian and its kin; 1 where it cannot be had
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || return 1
    echo "base: installing debootstrap, which is missing"
    local install=(env DEBIAN_FRONTEND=noninteractive apt-get -qq --yes --no-install-recommends
        install debootstrap debian-archive-keyring)
    # The lists of a fresh machine may be empty or old.
    { "${install[@]}" || { apt-get -qq update && "${install[@]}"; }; } >/dev/null
}

if ! have_debootstrap && ! { install_debootstrap && have_debootstrap; }; then
    echo "base: debootstrap is missing. On Debian or Ubuntu: apt-get install debootstrap" >&2
    exit 1
fi
as_root=()
if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null 2>&1 ||
        { echo "base: debootstrap needs root. Run 'make base' as root, or install sudo." >&2; exit 1; }
    as_root=(sudo "--preserve-env=http_proxy,https_proxy,no_proxy")
fi

root=$(mktemp -d)
clean() {
    [ ! -e "$root/debian" ] || "${as_root[@]}" rm -rf "$root/debian"
    rmdir "$root"
}
trap clean EXIT

echo "base: fetching Debian $SUITE into $TAG (two minutes or less)"
"${as_root[@]}" debootstrap --variant=minbase --include=ca-certificates "$SUITE" "$root/debian" \
    ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"} | grep --line-buffered -E '^(E|W):|Base system' || true
[ -f "$root/debian/etc/debian_version" ] ||
    { echo "base: debootstrap failed; see the lines above. Set DEBIAN_MIRROR to a mirror that" \
        "answers, and http_proxy where there is one." >&2; exit 1; }

mirror=$(awk '$1 == "deb" {print $2; exit}' "$root/debian/etc/apt/sources.list")
security=${DEBIAN_SECURITY_MIRROR:-${mirror%/}-security}
"${as_root[@]}" tee "$root/debian/etc/apt/sources.list" >/dev/null <<EOF
deb $mirror $SUITE main
deb $mirror $SUITE-updates main
deb $security $SUITE-security main
EOF
# Services do not start and documentation is not kept, as in Debian's own slim image.
"${as_root[@]}" tee "$root/debian/usr/sbin/policy-rc.d" >/dev/null <<'EOF'
#!/bin/sh
exit 101
EOF
"${as_root[@]}" chmod 755 "$root/debian/usr/sbin/policy-rc.d"
"${as_root[@]}" tee "$root/debian/etc/dpkg/dpkg.cfg.d/slim" >/dev/null <<'EOF'
path-exclude /usr/share/doc/*
path-include /usr/share/doc/*/copyright
path-exclude /usr/share/man/*
path-exclude /usr/share/info/*
path-exclude /usr/share/locale/*
EOF
"${as_root[@]}" chroot "$root/debian" sh -ec '
    export DEBIAN_FRONTEND=noninteractive
    apt-get -qq update
    apt-get -qq --yes dist-upgrade >/dev/null
    apt-get -qq clean
    rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/*-old /var/log/* /usr/share/man \
        /usr/share/info /usr/share/locale /etc/resolv.conf /etc/hostname
    find /usr/share/doc -type f ! -name copyright -delete
    find /usr/share/doc -depth -type d -empty -delete
'
"${as_root[@]}" tar --create --numeric-owner --directory "$root/debian" . |
    docker import --change 'CMD ["bash"]' \
        --message "debootstrap $SUITE from a Debian mirror" - "$TAG" >/dev/null
echo "base: $TAG, Debian $(cat "$root/debian/etc/debian_version")," \
    "$(docker image inspect --format '{{.Size}}' "$TAG" | awk '{printf "%.0f MB", $1 / 1e6}')"
