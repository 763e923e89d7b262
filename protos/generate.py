"""Writes the Python code of the .proto files beside them, or checks that it is current.

python -m protos.generate [--check]
"""

import argparse
import os
import sys
import sysconfig
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parents[1]
WITHOUT_SERVICES = "generation"


def generate(target: Path) -> None:
    """All generated files, at protos/ below `target`."""
    scripts = Path(sysconfig.get_path("scripts"))
    sources = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "protos").glob("*.proto"))
    os.chdir(ROOT)
    status = protoc.main(
        [
            "protoc",
            f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
            "--proto_path=.",
            f"--python_out={target}",
            f"--mypy_out=quiet:{target}",
            f"--grpc_python_out={target}",
            f"--mypy_grpc_out=quiet:{target}",
            *sources,
        ]
    )
    if status:
        raise SystemExit(status)
    for path in (target / "protos").glob(f"{WITHOUT_SERVICES}_pb2_grpc.py*"):
        path.unlink()


def differences(target: Path) -> list[str]:
    """Names of generated files that are not as they would be generated now."""
    fresh = {p.name: p.read_text() for p in (target / "protos").glob("*_pb2*")}
    known = {p.name: p.read_text() for p in (ROOT / "protos").glob("*_pb2*")}
    return sorted(n for n in fresh.keys() | known.keys() if fresh.get(n) != known.get(n))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, fail if not current")
    if not parser.parse_args().check:
        generate(ROOT)
        return
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        if stale := differences(Path(folder)):
            sys.exit(f"not current: {', '.join(stale)}; run python -m protos.generate")


if __name__ == "__main__":
    main()
