"""`make setup` begins with a Python that is good for the rest, or says which would be."""

import shlex
import subprocess
import sys
from pathlib import Path

MAKEFILE = Path(__file__).parents[1] / "Makefile"
NEEDED = "Python 3.11 or newer is needed, and this is 3.10: rm -rf .venv; make setup PYTHON="
# Runs what it is given by -c as a Python of that version, and notes and fails all else.
PYTHON = f"""#!/bin/sh
if [ "$1" = -c ]; then
    exec {shlex.quote(sys.executable)} -c "import sys; sys.version_info = VERSION
$2"
fi
echo "NAME $*" >> {{folder}}/asked
exit 1
"""


def python(file: Path, folder: Path, version: tuple[int, int]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    text = PYTHON.format(folder=shlex.quote(str(folder)))
    file.write_text(text.replace("VERSION", str(version)).replace("NAME", file.parent.name))
    file.chmod(0o755)
    return file


def setup(folder: Path, python: Path) -> tuple[str, list[str]]:
    """What it says, and what the Pythons were asked."""
    for name in ("pyproject.toml", "constraints.txt"):
        (folder / name).touch()
    words = ["make", f"--file={MAKEFILE}", "setup", f"PYTHON={python}"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    asked = folder / "asked"
    return done.stderr, asked.read_text().splitlines() if asked.exists() else []


def test_nothing_is_made_with_an_old_python(tmp_path: Path) -> None:
    told, asked = setup(tmp_path, python(tmp_path / "old/python", tmp_path, (3, 10)))
    assert NEEDED in told
    assert asked == []


def test_what_an_old_python_has_left_is_told(tmp_path: Path) -> None:
    """Though the one that is asked for would do."""
    python(tmp_path / ".venv/bin/python", tmp_path, (3, 10))
    told, asked = setup(tmp_path, python(tmp_path / "new/python", tmp_path, (3, 14)))
    assert NEEDED in told
    assert asked == []


def test_a_folder_without_pip_is_completed(tmp_path: Path) -> None:
    python(tmp_path / ".venv/bin/python", tmp_path, (3, 11))
    _, asked = setup(tmp_path, python(tmp_path / "new/python", tmp_path, (3, 11)))
    assert asked == ["bin -m pip --version", "new -m venv .venv"]
