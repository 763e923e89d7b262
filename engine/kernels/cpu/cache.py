"""Where compiled kernels are kept between processes."""

import contextlib
import hashlib
import logging
import os
import shutil
import stat
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import llvmlite
import numba

from engine.kernels.cpu.kept import this_cpu

logger = logging.getLogger(__name__)

UNUSED_AFTER_S = 30 * 24 * 3600.0


@cache
def cache_home() -> Path | None:
    """NUMBA_CACHE_DIR if that is set, else the user's cache. If it cannot be written, it has to
    be complete, as that of a container's image; or it is this user's own folder among temporary
    ones. None if there is no place for that either."""
    try:
        home = Path(numba.config.CACHE_DIR or _user_cache())
        _prepare_unless_complete(home)
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        logger.warning("%s; so compiled kernels are kept with temporary files", error)
        return _temporary_home()
    return home


@cache
def cache_directory(home: Path) -> Path:
    """Every version of the sources has its own."""
    return home / "kvrelay" / f"kernels-{_sources()}"


def complete_marker(folder: Path, kinds: str = "*") -> Path:
    """The file that says that a folder has all kernels of these kinds for this CPU."""
    return folder / f"complete-{kinds}-{this_cpu()}"


def _prepare_unless_complete(home: Path) -> None:
    try:
        prepare(home)
    except OSError:
        own = cache_directory(home)
        if not any(own.rglob(complete_marker(own).name)):
            raise


def prepare(home: Path) -> None:
    """Makes the directory, and removes those that nothing has used for a month."""
    own = cache_directory(home)
    own.mkdir(parents=True, exist_ok=True, mode=0o700)
    tempfile.TemporaryFile(dir=own).close()
    os.utime(own)
    for other in own.parent.glob("kernels-*"):
        with contextlib.suppress(OSError):  # another process was faster, or it is not ours
            if other != own and time.time() - other.stat().st_mtime > UNUSED_AFTER_S:
                shutil.rmtree(other, ignore_errors=True)


def _temporary_home() -> Path | None:
    """What is kept there is run: a folder that others may write to is none."""
    home = Path(tempfile.gettempdir(), f"kvrelay-kernels-{os.getuid()}")
    try:
        home.mkdir(exist_ok=True, mode=0o700)
        status = home.lstat()
        is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        if not is_ours or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise PermissionError(f"{home} is not this user's own")
        prepare(home)
    except OSError as error:
        logger.warning("%s", error)
        return None
    return home


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _sources() -> str:
    """Everything that decides the machine code, but the CPU, and what can be read of it."""
    digest = hashlib.blake2b(digest_size=8)
    versions = numba.__version__, llvmlite.__version__, sys.implementation.cache_tag
    digest.update(repr(versions).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()
