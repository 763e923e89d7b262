"""What a machine or its user may lack for Ray is told, or made, before Ray starts."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray._private import services, utils
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

from cluster.ray_needs import FOLDER, MODE, TOKEN, check_folder, hush_store, make_token
from engine.errors import ConfigError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a user for whom nothing is set. Ray's library remembers what it has found."""
    for name in (TOKEN, f"{TOKEN}_PATH", MODE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    loader = AuthenticationTokenLoader.instance()
    loader.reset_cache()
    yield tmp_path
    monkeypatch.undo()
    loader.reset_cache()


def has_token() -> bool:
    return bool(AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True))


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


def test_a_token_is_its_users_alone(home: Path) -> None:
    """Whoever has it runs what they like as this user."""
    file = home / ".ray/auth_token"
    before = os.umask(0o022)
    try:
        make_token()
    finally:
        os.umask(before)
    assert has_token()
    assert file.stat().st_mode & 0o777 == 0o600
    token = file.read_text()
    make_token()
    assert file.read_text() == token, "other clusters of this user's have it"


def test_without_a_home_a_cluster_has_a_token_of_its_own(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/proc/self")
    monkeypatch.setenv(TOKEN, "")  # so that it is taken away again
    make_token()
    assert has_token()


def test_where_none_is_asked_for_none_is_made(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODE, "disabled")
    make_token()
    assert not has_token()


def test_a_small_dev_shm_is_no_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(utils, "get_shared_memory_bytes", lambda: 64 << 20)
    logger = logging.getLogger(services.__name__)
    before = logger.level
    hush_store()
    try:
        services.determine_plasma_store_config(1 << 30, str(tmp_path))
    finally:
        logger.setLevel(before)
    assert caplog.messages == []
    services.determine_plasma_store_config(1 << 30, str(tmp_path))
    assert "--shm-size" in caplog.text, "it is Ray's to say elsewhere"
