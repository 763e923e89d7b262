"""What Ray needs before it starts: a folder that is good for it."""

from __future__ import annotations

import os
from pathlib import Path

from ray._common.utils import get_default_ray_temp_dir

from engine.errors import ConfigError

FOLDER = "RAY_TMPDIR"
# What is behind the folder's own in the path of a socket, and how long Linux lets that be.
_SOCKET = "/session_2026-11-29_10-20-30_123456_4194304/sockets/plasma_store"
_MOST_LETTERS = 107
_LEAST_BYTES = 64 << 20  # a start takes some MiB of them for logs


def check_folder() -> None:
    """ConfigError where Ray could not have its sockets and logs: of most of this it says so in
    words of its own that name no way out."""
    folder = Path(get_default_ray_temp_dir())  # type: ignore[no-untyped-call]
    problem = _problem(folder)
    if problem is not None:
        most = _MOST_LETTERS - len(f"/ray{_SOCKET}")
        raise ConfigError(
            FOLDER,
            f"{folder}, where Ray is to have its sockets and logs, {problem}; set {FOLDER} to the"
            f" path of a folder of yours, of {most} ASCII letters at most",
        )


def _problem(folder: Path) -> str | None:
    if not folder.is_absolute():
        return "is no whole path"
    if not str(folder).isascii():
        return "has letters that are not ASCII's"
    if len(f"{folder}{_SOCKET}") > _MOST_LETTERS:
        return "is too long for the path of a socket"
    there = next(place for place in (folder, *folder.parents) if os.path.exists(place))
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        return f"cannot be written ({there})"
    disk = os.statvfs(there)
    if disk.f_bavail * disk.f_frsize < _LEAST_BYTES:
        return f"is on a full disk ({disk.f_bavail * disk.f_frsize >> 20} MiB are left)"
    return None
