#!/usr/bin/env bash
# Checks the GPU path, then measures it beside the card's own limits. Nine minutes at most: what is
# not begun by then is named. A part of NAME is one of parts.py, or all of a group of them; a visit
# to a card is all of it at once, and then `--part limits --part attempts`.
#
#   benchmarks/gpu/run.sh [--part NAME]... [--out FOLDER] [--total-s SECONDS] [--smoke]
#
# Leaves results.json, table.txt and log.txt in FOLDER ($OUT, or benchmarks/results/gpu).
# --smoke: tiny shapes, on the CPU too, where Triton's interpreter runs the kernels.
set -uo pipefail
cd "$(dirname "$0")/../.."
if [ -f .nixl/packed.tgz ]; then # see fetch_nixl.sh
    mkdir -p .nixl/unpacked
    tar -xzf .nixl/packed.tgz -C .nixl/unpacked
    export PYTHONPATH="$PWD/.nixl/unpacked${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
