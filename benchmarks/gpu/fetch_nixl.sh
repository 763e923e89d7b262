#!/usr/bin/env bash
# NIXL for a GPU machine with Python 3.12 that can reach no registry: .nixl/packed.tgz, 30 MiB, which
# travels with the source tree and is unpacked there by run.sh. Needs pip and a registry here.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
"$python" -m pip download --quiet --no-deps --only-binary :all: --python-version 3.12 \
    --dest "$folder" nixl nixl-cu13
for wheel in "$folder"/*.whl; do
    "$python" -m zipfile --extract "$wheel" "$folder/unpacked"
done
rm -r "$folder"/unpacked/nixl_ep* # kernels for experts, half of it all
mkdir -p .nixl
tar -czf .nixl/packed.tgz -C "$folder/unpacked" .
ls -lh .nixl/packed.tgz
