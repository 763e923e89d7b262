"""vLLM's own load generator at the front of `kvrelay serve`: a client that is none of ours.

    python -m benchmarks.peers.vllm_bench --vllm-python VENV/bin/python

`vllm bench serve` asks the bundled model on either endpoint, streaming, with random prompts; the
tables are its own. Ends with 1 if a request failed, or had another number of tokens than asked.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.servers import free_port, kvrelay
from benchmarks.serving.processes import Family
from benchmarks.serving.systems import serving

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
NUM_PROMPTS, NUM_AT_ONCE, NUM_IN, NUM_OUT = 48, 4, 128, 32
MODEL = Path(__file__).parents[2] / "engine/bundled"


def ask(vllm_python: Path, url: str, backend: str, folder: Path) -> dict[str, Any]:
    """What it has noted of its requests."""
    flags = {
        "backend": backend,
        "base-url": url,
        "endpoint": ENDPOINTS[backend],
        "model": "bundled",
        "tokenizer": MODEL,
        "dataset-name": "random",
        "random-input-len": NUM_IN,
        "random-output-len": NUM_OUT,
        "num-prompts": NUM_PROMPTS,
        "max-concurrency": NUM_AT_ONCE,
        "temperature": 0,
        "ready-check-timeout-sec": 120,
        "result-dir": folder,
        "result-filename": f"{backend}.json",
    }
    command = [str(vllm_python), "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
    command += [f"--{name}={value}" for name, value in flags.items()]
    command += ["--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout[done.stdout.index("====") :])
    noted: dict[str, Any] = json.loads((folder / f"{backend}.json").read_text())
    return noted


def is_whole(noted: dict[str, Any]) -> bool:
    num_done, num_tokens = noted["completed"], sorted(set(noted["output_lens"]))
    print(f"{noted['backend']}: {num_done} of {NUM_PROMPTS} requests are complete")
    print(f"tokens of an answer: {num_tokens}, asked for: {NUM_OUT}\n", flush=True)
    return (num_done, num_tokens) == (NUM_PROMPTS, [NUM_OUT])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm-python", type=Path, required=True, help="see setup_vllm.sh")
    vllm_python = parser.parse_args().vllm_python
    os.environ.pop("RAY_ADDRESS", None)
    family, port = Family(), free_port()
    command = kvrelay("serve", "--port", str(port))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            with serving(command, family.environment, folder / "serve.log", port) as url:
                whole = [is_whole(ask(vllm_python, url, one, folder)) for one in ENDPOINTS]
        finally:
            family.end()
    sys.exit(not all(whole))


if __name__ == "__main__":
    main()
