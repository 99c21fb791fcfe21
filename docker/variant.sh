#!/usr/bin/env bash
# Print the image variant for this machine: $VARIANT where it is set, cpu where there is no NVIDIA
# GPU, cu126 otherwise. Says which and why on stderr.
set -euo pipefail

if [ -n "${VARIANT:-}" ]; then
    case "$VARIANT" in
        cpu | cu126 | cu129) ;;
        *) echo "image: VARIANT=$VARIANT is not one of cpu, cu126, cu129." >&2; exit 2 ;;
    esac
    variant=$VARIANT reason="VARIANT is set"
elif [ -e /dev/nvidiactl ]; then
    variant=cu126 reason="/dev/nvidiactl is there; VARIANT=cu129 is for Blackwell"
elif command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi --list-gpus 2>/dev/null | grep -q GPU; then
    variant=cu126 reason="nvidia-smi lists a GPU; VARIANT=cu129 is for Blackwell"
else
    variant=cpu reason="no NVIDIA GPU: neither /dev/nvidiactl nor one that nvidia-smi lists"
fi
echo "image: variant $variant ($reason)" >&2
echo "$variant"
