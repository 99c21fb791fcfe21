# One image for every node: Python 3.11 from Debian 12, the hash-locked packages, the recipes.
#
#   make image                                   picks the variant and the base, passes proxy,
#                                                index and certificates (docker/build.sh)
#   docker build -t fleet-recipes:cpu --build-arg VARIANT=cpu .     works as well
#
# VARIANT: cu126 (NVIDIA GPUs up to Hopper), cu129 (Blackwell too), cpu. The variants differ in the
# Paddle wheel and its CUDA wheels, and in nothing else.
#
# It is written for Docker's classic builder and for BuildKit. Nothing that the build needs from its
# surroundings reaches the image: proxies are Docker's predefined arguments, and the package index
# and certificates exist in the stage "packages" alone, of which only the finished environment
# is copied.
ARG BASE=debian:bookworm-20250520-slim

# ---- the system: shared by the stage that installs and by the image --------------------------------
FROM ${BASE} AS system
# libgomp1: Paddle's wheel needs the system's.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        ca-certificates libgomp1 python3.11 tini \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/*-old /var/log/apt /var/log/*.log

# ---- the packages: not shipped ---------------------------------------------------------------------
FROM system AS packages
RUN apt-get update && apt-get install --yes --no-install-recommends python3.11-venv
ARG VARIANT=cu126
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
# A mirror of Paddle's own index, the part before /cu126/.
ARG PADDLE_INDEX
# docker/certificates.pem is there only where the classic builder needs one; BuildKit gets a secret.
COPY docker/requirements*.lock docker/pip_install.py docker/image-packages.sh \
    docker/trim.sh docker/check_installed.py docker/describe_packages.py \
    docker/certificates.pe[m] /build/
RUN /build/image-packages.sh "${VARIANT}" /opt/venv && /build/trim.sh /opt/venv \
    && /opt/venv/bin/python /build/describe_packages.py /opt/packages.json

# ---- the recipes and what the image says of itself: not shipped ------------------------------------
FROM system AS recipes
COPY . /image/workspace
# Readable whatever the umask of the checkout was. outputs/ and data/ are for any user, and so is the
# folder itself, for programs that write beside the code (the bare paddle.distributed.launch puts its
# log/ there).
RUN cd /image/workspace && rm -f docker/certificates.pem && mkdir -p outputs data \
    && chmod -R a+rX,go-w . && chmod 1777 . outputs data
COPY --from=packages /opt/packages.json /build/
ARG VARIANT=cu126
ARG BASE
ARG VERSION=unknown
ARG GIT_COMMIT=unknown
ARG BUILD_DATE=unknown
RUN python3.11 /image/workspace/docker/describe_image.py --variant "${VARIANT}" --base "${BASE}" \
    --version "${VERSION}" --revision "${GIT_COMMIT}" --created "${BUILD_DATE}" \
    --packages /build/packages.json /image/etc/fleet-recipes/image.json

# ---- the image -------------------------------------------------------------------------------------
FROM system
RUN useradd --uid 1000 --user-group --home-dir /home/fleet --shell /bin/bash fleet \
    && install --directory --owner fleet --group fleet --mode 1777 /home/fleet \
    && install --directory --mode 1777 /workspace
ARG VARIANT=cu126
ARG BASE
ARG VERSION=unknown
ARG GIT_COMMIT=unknown
ARG BUILD_DATE=unknown
# name==version of every Python package, separated by blanks; build.sh takes it from the locks.
ARG PACKAGES=unknown
ARG PADDLE=unknown
# What train.sh compares a checkout with (docker/content.sh).
ARG CODE_DIGEST=unknown
ARG PACKAGES_DIGEST=unknown
# LOGNAME names the user also under a uid that /etc/passwd does not know (docker run --user).
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/home/fleet \
    LOGNAME=fleet \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /workspace
USER fleet
# tini reaps orphans and forwards signals; -s keeps it quiet under `docker run --init`.
ENTRYPOINT ["/usr/bin/tini", "-s", "--", "/workspace/docker/entrypoint.sh"]
CMD ["train.py", "--help"]

# From the largest and least often changed to the smallest. The classic builder walks the whole image
# after each step, so few come after the packages.
COPY --from=packages /opt/venv /opt/venv
COPY --from=recipes /image /
LABEL org.opencontainers.image.title="fleet-recipes" \
    org.opencontainers.image.description="Data-parallel training with PaddlePaddle's Fleet API" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${GIT_COMMIT}" \
    org.opencontainers.image.created="${BUILD_DATE}" \
    org.opencontainers.image.base.name="${BASE}" \
    fleet-recipes.variant="${VARIANT}" \
    fleet-recipes.paddle="${PADDLE}" \
    fleet-recipes.packages="${PACKAGES}" \
    fleet-recipes.code-digest="${CODE_DIGEST}" \
    fleet-recipes.packages-digest="${PACKAGES_DIGEST}"
