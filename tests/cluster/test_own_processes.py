"""No process of a cluster outlives the command that started it, however that ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = """
import subprocess, sys
from cluster.own_processes import own_processes

with own_processes() as folder:
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print(folder, flush=True)
    sys.stdin.readline()
"""
GONE_S = 60.0


@pytest.mark.parametrize(("is_killed", "status"), [(True, -9), (False, 0)])
def test_what_a_command_started_ends_with_it(is_killed: bool, status: int) -> None:
    """With whoever sees to that: all of them have the command's output open."""
    words = [sys.executable, "-c", COMMAND]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as command:
        assert command.stdout is not None
        folder = Path(command.stdout.readline().strip())
        assert folder.is_dir()
        if is_killed:
            command.kill()
        command.communicate("" if is_killed else "\n", timeout=GONE_S)
    assert command.returncode == status
    assert not folder.exists()
