"""The wheel that `make wheel` builds, built without a network and without a trace in the tree.

python -m tests.deploy.wheel FOLDER    leaves it in the folder
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def packages() -> list[str]:
    """The project's folders that are packed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["packages"]["find"]["include"]
    return [pattern.removesuffix("*") for pattern in patterns]


def build_wheel(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as copy:
        for name in packages():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, Path(copy) / name, ignore=ignored)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, copy)
        words = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), copy]
        subprocess.run([sys.executable, "-m", "pip", "wheel", *words], check=True)


if __name__ == "__main__":
    build_wheel(Path(sys.argv[1]))
