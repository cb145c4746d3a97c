#!/usr/bin/env bash
# Checks and measures the engine on a bare GPU box, in under eight minutes, and writes one JSON.
#
#     ops/device_check.sh [--out FILE] [--limit-s SECONDS] [--parts a,b,...]
#     ops/device_check.sh --dry-run        the same on a CPU, with tiny shapes: does it work at all?
#
# Needs python3 with torch >= 2.11, triton >= 3.6, transformers >= 5.17, safetensors, numpy and pytest;
# nothing is installed and nothing is downloaded. $PYTHON names another interpreter.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
links="$(mktemp -d)"
trap 'rm -rf "$links"' EXIT

mkdir "$links/tokenfleet"
for package in engine kernels; do
    ln -s "$root/$package" "$links/tokenfleet/$package"
done

export PYTHONPATH="$links${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1
"${PYTHON:-python3}" "$root/ops/bench/device.py" --work "$links" "$@"
