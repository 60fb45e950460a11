#!/usr/bin/env bash
# Build deploy/Dockerfile without a container engine, and run the demo in the image: buildah with chroot isolation, on a
# Debian base from debootstrap. Needs root, Debian's packages buildah and debootstrap, about 12 GB of disk and 20 minutes
# on two cores.
#
#     tools/image_check.sh [FOLDER]
#
# FOLDER, a new temporary folder by default, is deleted at the end. KEEP=1 keeps it, and its image is used again.
# Optional variables:
#
#     DEBIAN_MIRROR   mirror for debootstrap
#     PIP_CONF        configuration file of pip, which the build uses as a secret
#     CA_CERTIFICATES file of certificates for pip, another secret; name it /run/secrets/ca_certificates in PIP_CONF
#     WHEELS          folder of wheels that PIP_CONF names in `find-links`; the build sees it under the same path
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$(realpath "${1:-$(mktemp -d)}")
mkdir -p "$folder/tmp"
# Intermediate files of buildah are as large as the image.
export TMPDIR=$folder/tmp BUILDAH_ISOLATION=chroot
store=(--root "$folder/store" --runroot "$folder/run" --storage-driver "${STORAGE_DRIVER:-overlay}")

clean() {
    buildah "${store[@]}" rm --all > /dev/null 2>&1 || true
    buildah "${store[@]}" rmi --all --force > /dev/null 2>&1 || true
    rm -rf "$folder"
}
[[ ${KEEP:-} == 1 ]] || trap clean EXIT

step() { printf '\n== %s: %s\n' "$(date +%H:%M:%S)" "$1"; }

build() {
    step "A Debian base with Python"
    packages=ca-certificates,python3,python3-venv
    # shellcheck disable=SC2086  # without a mirror, there must be no argument
    [[ -d $folder/base ]] || debootstrap --variant=minbase --include="$packages" bookworm "$folder/base" ${DEBIAN_MIRROR:-}
    container=$(buildah "${store[@]}" from scratch)
    buildah "${store[@]}" copy --quiet "$container" "$folder/base" /
    buildah "${store[@]}" commit --quiet --rm "$container" localhost/latentline-base
    rm -rf "$folder/base"

    step "The image"
    options=(--build-arg BASE=localhost/latentline-base)
    [[ -z ${PIP_CONF:-} ]] || options+=(--secret "id=pip_conf,src=$PIP_CONF")
    [[ -z ${CA_CERTIFICATES:-} ]] || options+=(--secret "id=ca_certificates,src=$CA_CERTIFICATES")
    [[ -z ${WHEELS:-} ]] || options+=(--volume "$WHEELS:$WHEELS:ro")
    buildah "${store[@]}" bud --pull-never "${options[@]}" --file deploy/Dockerfile --tag localhost/latentline .
    buildah "${store[@]}" images
}
buildah "${store[@]}" inspect --type image localhost/latentline > /dev/null 2>&1 || build

container=$(buildah "${store[@]}" from --pull-never localhost/latentline)
inside() { buildah "${store[@]}" run "$container" -- "$@"; }

step "The user, and the programs"
[[ $(inside id -u) == 1000 ]]
inside sh -c '! touch /app/assets/file 2> /dev/null'
inside python -m demo.concept_pictures data/demo
inside latentline validate demo
inside dagster-webserver --version
inside dagster-daemon --version
inside sh -c '! python -c "import pytest" 2> /dev/null'

step "The code server"
# A shell starts background processes without SIGINT, and Dagster handles SIGTERM like SIGINT: hence KILL.
# shellcheck disable=SC2016  # expands in the container
inside sh -c 'dagster code-server start -h 127.0.0.1 -p 4000 -m assets.definitions & server=$!
    for _ in $(seq 120); do sleep 1; dagster api grpc-health-check -p 4000 && break; done
    dagster api grpc-health-check -p 4000; kill -KILL $server'

step "The job demo_train"
inside dagster job execute -m assets.definitions -j demo_train
inside sh -c 'ls -l outputs/demo/lora'
inside test -s outputs/demo/lora/pytorch_lora_weights.safetensors

step "No secret and no pip configuration in the image"
inside sh -c '! ls /run/secrets/* /etc/pip.conf 2> /dev/null'
buildah "${store[@]}" inspect --type image localhost/latentline > "$folder/image.json"
if grep -iE "password|token|index-url" "$folder/image.json"; then exit 1; fi

step "Done"
