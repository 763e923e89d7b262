"""Where compiled kernels are kept between processes."""

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock

import llvmlite
import numba

UNUSED_AFTER_S = 30 * 24 * 3600.0

_lock = Lock()


@contextmanager
def kept_on_disk() -> Iterator[None]:
    """Functions that Numba is asked to cache inside the block go to our directory.

    Numba would put them beside the source, which may be read-only, and would not see that a
    function in another file changed; the directory's name covers every file of this package.
    It is in NUMBA_CACHE_DIR if that is set, else in the user's cache.
    Numba replaces its files atomically, so processes that start at once do not disturb each
    other.
    """
    with _lock:
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(_directory())
        try:
            yield
        finally:
            numba.config.CACHE_DIR = before


def cache_directory(home: Path) -> Path:
    """A private directory below `home`, or a temporary one if `home` cannot be written.

    Every version of the sources has its own; those that nothing has used for a month go.
    """
    place = home / "kvrelay" / f"kernels-{_sources()}"
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        tempfile.TemporaryFile(dir=place).close()
        os.utime(place)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="kvrelay-kernels-"))
    _remove_unused(place)
    return place


def _remove_unused(own: Path) -> None:
    for other in own.parent.glob("kernels-*"):
        with contextlib.suppress(OSError):  # another process was faster, or it is not ours
            if other != own and time.time() - other.stat().st_mtime > UNUSED_AFTER_S:
                shutil.rmtree(other, ignore_errors=True)


@cache
def _directory() -> Path:
    return cache_directory(Path(numba.config.CACHE_DIR or _user_cache()))


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _sources() -> str:
    """Everything that decides the machine code, but the CPU, which Numba's own key covers."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(f"{numba.__version__} {llvmlite.__version__}".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()
