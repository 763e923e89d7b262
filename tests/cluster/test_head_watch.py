"""Ray's head is missed from the moment that it is started, and it is told how it ended."""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster import head_watch
from cluster.head_watch import HeadWatch

SAID_S = 30.0


@contextmanager
def child(name: str, folder: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Known to the system by the name."""
    program = shutil.which(words[0])
    assert program is not None
    (folder / name).symlink_to(program)
    process = subprocess.Popen(words, executable=folder / name)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_head_that_ends_before_ray_is_there_is_told(tmp_path: Path) -> None:
    told: queue.Queue[str] = queue.Queue()
    with child("gcs_server", tmp_path, "sleep", "1000") as gcs, child("other", tmp_path, "true"):
        watch = HeadWatch(told.put)
        gcs.kill()
        assert told.get(timeout=SAID_S) == "Ray's gcs_server was ended by SIGKILL"
        assert watch.stop()
        assert gcs.wait() < 0, "Ray waits for it, too"
    assert told.empty()


def test_it_looks_past_processes_whose_names_are_no_text(tmp_path: Path) -> None:
    told: list[str] = []
    with child(os.fsdecode(b"wei\xdfer"), tmp_path, "sleep", "1000"):
        watch = HeadWatch(told.append)
        with child("raylet", tmp_path, "true") as raylet:
            os.waitid(os.P_PID, raylet.pid, os.WEXITED | os.WNOWAIT)
            assert watch.stop()
    assert told == ["Ray's raylet ended with status 0"]


def test_a_head_that_has_just_ended_is_found_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As what else fails without it is known sooner."""
    monkeypatch.setattr(head_watch, "_STARTING_POLL_S", 1000)
    told: list[str] = []
    watch = HeadWatch(told.append)
    with child("raylet", tmp_path, "sh", "-c", "exit 3") as raylet:
        os.waitid(os.P_PID, raylet.pid, os.WEXITED | os.WNOWAIT)
        assert watch.stop()
    assert told == ["Ray's raylet ended with status 3"]
