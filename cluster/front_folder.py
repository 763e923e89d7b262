"""The folder of a front's files, and what others of the same user's have left.

A folder is told by the file in it that its owners have locked, and not by its name. The file says
which kernel the lock is known to: where the place is several hosts', another's may live.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

# Not TMPDIR: of a socket's path HAProxy takes 97 letters, with the node's id, which is 56 of them.
PLACE = Path("/tmp")
_PREFIX = "kvrelay-front-"
_LOCK = "owner.lock"


def new_folder() -> tuple[Path, int]:
    """And its lock: the folder is owned for as long as any process has that open."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=PLACE))
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    with suppress(OSError):  # where files cannot be locked: nobody will know that it is left
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, _kernel())
    return folder, lock


def remove_left() -> None:
    """Folders whose owners were all killed. No process is looked for: HAProxy, should it have
    outlived them, has its files no more, and its port still."""
    for folder in PLACE.glob(f"{_PREFIX}*"):
        with suppress(OSError), ExitStack() as held:  # it has an owner, or is not ours to open
            lock = os.open(folder / _LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            held.callback(os.close, lock)
            if not (_is_own(os.lstat(folder)) and stat.S_ISREG(os.fstat(lock).st_mode)):
                continue
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.read(lock, 100) == _kernel():
                shutil.rmtree(folder, ignore_errors=True)


def _is_own(folder: os.stat_result) -> bool:
    return stat.S_ISDIR(folder.st_mode) and folder.st_uid == os.getuid()


def _kernel() -> bytes:
    """Of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_bytes()
