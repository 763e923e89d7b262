"""What a machine lacks for Ray is told before Ray starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster.ray_needs import FOLDER, check_folder
from engine.errors import ConfigError


@pytest.mark.parametrize(
    ("folder", "problem"),
    [
        ("somewhere/else", "is no whole path"),
        ("/tmp/é", "not ASCII"),
        ("/tmp/" + "x" * 40, "too long"),
        ("/proc/self", r"cannot be written \(/proc/self\)"),
        ("/etc/passwd", "cannot be written"),
    ],
)
def test_a_folder_that_ray_could_not_use_is_told(
    folder: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, folder)
    with pytest.raises(ConfigError, match=rf"{folder}.*{problem}.*at most") as told:
        check_folder()
    assert told.value.field == FOLDER


def test_as_many_letters_as_it_says_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, "/tmp/" + "x" * 34)
    check_folder()
    monkeypatch.setenv(FOLDER, "/tmp/" + "x" * 35)
    with pytest.raises(ConfigError, match="of 39 ASCII letters at most"):
        check_folder()


def test_a_disk_without_room_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = list(os.statvfs(tmp_path))
    values[4] = 2 << 20  # bytes; f_bavail
    values[1] = 1  # f_frsize
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(values))
    monkeypatch.setenv(FOLDER, "/tmp")
    with pytest.raises(ConfigError, match=r"full disk \(2 MiB are left\)"):
        check_folder()
