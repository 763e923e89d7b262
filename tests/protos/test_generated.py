"""What the checked-in code asks of whoever installs the least that we ask for."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]


def test_the_oldest_protobuf_that_may_be_installed_reads_the_generated_code() -> None:
    """A runtime refuses what a newer compiler has written, and CI has a newer one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {r.name: r.specifier for r in map(Requirement, project["dependencies"])}
    (least,) = [Version(s.version) for s in required["protobuf"] if s.operator == ">="]
    generated = sorted((ROOT / "protos").glob("*_pb2.py"))
    assert generated
    for path in generated:
        (written_by,) = re.findall(r"^# Protobuf Python Version: (.+)$", path.read_text(), re.M)
        assert Version(written_by) <= least, path.name
