"""What Ray needs of its user before it starts: a folder that is good for it, and a token; and
what it would ask for in vain."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

from ray._common.utils import get_default_ray_temp_dir
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

from engine.errors import ConfigError

FOLDER, TOKEN, MODE = "RAY_TMPDIR", "RAY_AUTH_TOKEN", "RAY_AUTH_MODE"
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


def make_token() -> None:
    """Where this user has none yet. Ray would write it for everybody to read, and would not start
    where there is no home to write it to: there the cluster has one of its own."""
    loader = AuthenticationTokenLoader.instance()
    if os.environ.get(MODE, "token").lower() != "token" or loader.has_token(ignore_auth_mode=True):
        return
    token = secrets.token_hex(32)
    try:
        file = Path.home() / ".ray" / "auth_token"
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as new:
            new.write(token)
    except FileExistsError:
        pass  # another start was faster, or Ray makes a good one of it
    except (OSError, RuntimeError):  # RuntimeError: this user has no home
        os.environ[TOKEN] = token
    loader.reset_cache()


def hush_store() -> None:
    """Where /dev/shm is small, as the 64 MiB that containers have, Ray says that its object store
    is slow and asks for a third of the machine's memory there. Nothing that counts goes through
    that store under us, and UCX, which does use /dev/shm, does with less."""
    logging.getLogger("ray._private.services").setLevel(logging.ERROR)
