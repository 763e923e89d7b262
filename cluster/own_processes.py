"""The processes of a Ray cluster of our own: none outlives the command that started it. Ray ends
what it knows of; HAProxy would go on, and keep the port.

This file is also the program of a guard beside the command, and so imports little.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, NoReturn

_MARK = "KVRELAY_CLUSTER"  # in the environment of every process of the cluster
_TITLE = b"ray::"
_KILL_S = 2.0


class _Cluster(NamedTuple):
    """By what its processes are known."""

    pid: str  # of the command
    since: str  # as Ray would name the folder of a session that began then, but for the pid
    folder: str  # of its front's files

    @classmethod
    def of(cls, mark: str) -> _Cluster | None:
        parts = mark.split(" ", 2)
        return cls(*parts) if len(parts) == len(cls._fields) else None

    def has(self, process: Path) -> bool:
        """By its environment, where several variables have the folder. The titles that Ray's
        agents give themselves lie over all or most of one; they are told by the logs that they
        have open, as whoever reads those has, who has no such title."""
        if self.folder.encode() in (process / "environ").read_bytes():
            return True
        is_ray_s = (process / "cmdline").read_bytes().startswith(_TITLE)
        return is_ray_s and any(map(self._is_session, _open_folders(process)))

    def _is_session(self, name: str) -> bool:
        """A name with the same pid may be an older one's, of a cluster that is there still."""
        return name >= self.since and name.endswith(f"_{self.pid}")


@contextmanager
def own_processes(files: Iterable[Path] = ()) -> Iterator[Path]:
    """What is started in the block ends with it, or with this process, should that be killed. The
    folder that it yields goes with it, and so do `files`, be they there by then. A folder whose
    guard was killed as well goes with the next start."""
    from cluster.front_folder import new_folder, remove_left  # the guard finds nothing of ours

    remove_left()
    folder, lock = new_folder()
    since = datetime.now().strftime("session_%Y-%m-%d_%H-%M-%S_%f")
    mark = " ".join(_Cluster(str(os.getpid()), since, str(folder)))
    # Not isolated, it would take `cluster/http.py` for Python's; without the mark, it stays.
    words = [sys.executable, "-I", "-S", __file__, mark, *map(str, files)]
    guard = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True, pass_fds=[lock])
    os.environ[_MARK] = mark
    try:
        yield folder
    finally:
        kill_processes()
        guard.communicate()
        os.close(lock)


def kill_processes() -> set[int]:
    """Of a cluster of our own, whatever they wait for, and those that have lost their parents;
    and the files of its front. The ids of those that were there."""
    own = _Cluster.of(os.environ.get(_MARK, ""))
    return _end(own) if own is not None and own.pid == str(os.getpid()) else set()


def begin_again(environment: Mapping[str, str]) -> NoReturn:
    """This command from its first word, in this process, when what it had started has ended."""
    # Or the next start would find them among its own: a child that gives its memory back has no
    # environment left to be known by, and is no zombie yet.
    for pid in kill_processes():
        with suppress(ChildProcessError):  # a child's child
            os.waitpid(pid, 0)
    while os.waitpid(-1, os.WNOHANG)[0]:
        pass
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], dict(environment))


def _end(own: _Cluster) -> set[int]:
    found: set[int] = set()
    deadline = time.monotonic() + _KILL_S
    # Whoever was started by one that was killed a moment later is found the next time.
    # To look may take longer than that where many cores' worth is asked of few.
    while left := _processes(own):
        found |= left
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(_KILL_S / 100)
    shutil.rmtree(own.folder, ignore_errors=True)
    return found


def _processes(own: _Cluster) -> set[int]:
    """And their children; not the command, nor who is looking."""
    parents, found = {}, set()
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        try:
            parents[pid] = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
            if own.has(entry):
                found.add(pid)
        except OSError:
            continue  # somebody else's, or it has ended meanwhile
    apart = {os.getpid(), int(own.pid)}
    found -= apart
    while children := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= children
    return found - apart


def _open_folders(process: Path) -> Iterator[str]:
    """The names of all those that its open files are in."""
    for entry in (process / "fd").iterdir():
        with suppress(OSError):  # it is closed meanwhile
            yield from Path(os.readlink(entry)).parts[:-1]


if __name__ == "__main__":
    sys.stdin.read()  # until the command has ended
    if own := _Cluster.of(sys.argv[1]):
        _end(own)
    for file in sys.argv[2:]:
        with suppress(OSError):  # of a folder that cannot be written
            Path(file).unlink(missing_ok=True)
