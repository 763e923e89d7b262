"""Clusters that `kvrelay serve` has started on this machine, for `kvrelay status` of the same user.

A file each, which only its owner may read, in a folder of that user's: where Ray and the front
are, and what opens the workers' connections. Gone when the cluster is. It is locked for as long as
its process lives, whose number may later be another process's.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from protos.secret import VARIABLE

logger = logging.getLogger("kvrelay.status")


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """`rpc`: as in `ClusterArgs`; names of files, nothing secret."""

    pid: int
    url: str
    ray_address: str
    ray_auth_mode: str
    rpc: Mapping[str, Any]


def folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """None of a user without a home."""
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "kvrelay"
    cache = environ.get("XDG_CACHE_HOME")
    try:
        home = Path(cache) if cache else Path.home() / ".cache"
    except RuntimeError:
        return None
    return home / "kvrelay" / "clusters"


@contextmanager
def noted(cluster: LocalCluster, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """As long as the block runs. A secret that is in the environment is written beside it. Where
    nothing can be written, as in a container without a home, only `kvrelay status` misses it."""
    with ExitStack() as held:
        try:
            _write(cluster, environ, held)
        except OSError as error:
            logger.warning("%s; so `kvrelay status` does not find this cluster", error)
        try:
            yield
        finally:
            forget(cluster.pid, environ)


def _write(cluster: LocalCluster, environ: Mapping[str, str], held: ExitStack) -> None:
    place = folder(environ)
    if place is None:
        raise FileNotFoundError("this user has no home")
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    rpc = dict(cluster.rpc)
    file = held.enter_context(_new(place / f"{cluster.pid}.json"))
    with suppress(OSError):  # where files cannot be locked
        fcntl.flock(file, fcntl.LOCK_EX)
    if VARIABLE in environ and not rpc.get("secret_file"):
        secret_file = place / f"{cluster.pid}.secret"
        with _new(secret_file) as secret:
            secret.write(environ[VARIABLE])
        rpc["secret_file"] = str(secret_file)
    file.write(json.dumps({**asdict(cluster), "rpc": rpc}))
    file.flush()


def forget(pid: int, environ: Mapping[str, str] = os.environ) -> None:
    for file in files_of(pid, environ):
        with suppress(OSError):  # as it could not be made
            file.unlink(missing_ok=True)


def files_of(pid: int, environ: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """For whoever removes them where the process cannot, as it was killed."""
    place = folder(environ)
    return () if place is None else (place / f"{pid}.json", place / f"{pid}.secret")


def local_clusters(environ: Mapping[str, str] = os.environ) -> list[LocalCluster]:
    """Those whose process lives, by age. What others left behind is removed."""
    found = []
    place = folder(environ)
    for path in [] if place is None else sorted(place.glob("*.json"), key=_age):
        cluster = _read(path)
        if cluster is not None and _is_locked(path):
            found.append(cluster)
        elif cluster is not None:
            path.unlink(missing_ok=True)
            path.with_suffix(".secret").unlink(missing_ok=True)
    return found


def _new(path: Path) -> TextIO:
    """Its owner's alone."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w")


def _read(path: Path) -> LocalCluster | None:
    """None for what is no such file, or is somebody else's."""
    try:
        if path.stat().st_uid != os.getuid():
            return None
        return LocalCluster(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _is_locked(path: Path) -> bool:
    """Or cannot be."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False
