"""One part in a process of its own.

python -m benchmarks.gpu.child NAME FOLDER LIMIT_S [--smoke]
"""

import argparse
import time
from pathlib import Path

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.parts import BY_NAME

SPARE_S = 10.0  # that a part should end before it is ended


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=BY_NAME)
    parser.add_argument("folder", type=Path)
    parser.add_argument("limit_s", type=float)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    bench = Bench(args.part, args.smoke, args.folder, time.monotonic() + args.limit_s - SPARE_S)
    seed = torch.seed()  # fresh inputs in every run
    bench.say(f"seed {seed}")
    with torch.inference_mode():
        BY_NAME[args.part].load().run(bench)


if __name__ == "__main__":
    main()
