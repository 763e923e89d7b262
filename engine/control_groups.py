"""What the control groups that this process is in leave it: version 1 and 2, own and above."""

from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import NamedTuple


class _MemoryFiles(NamedTuple):
    """The same under the names of one version; the last three are keys of `memory.stat`."""

    limit: str
    used: str
    inactive: str
    active: str
    mapped: str


_MEMORY_FILES = (
    _MemoryFiles("memory.max", "memory.current", "inactive_file", "active_file", "file_mapped"),
    _MemoryFiles(
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
        "total_active_file",
        "total_mapped_file",
    ),
)


class ControlGroups:
    """Reads files when it is asked; does not know what the machine itself has."""

    def __init__(
        self, root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
    ) -> None:
        self._root = root
        self._own = own

    def memory_left(self) -> float:
        """Bytes until the first limit; infinite where there is none."""
        return min(map(_memory_left, self._folders("memory")), default=inf)

    def num_cpus(self) -> float:
        """CPU seconds a second, as quota and period give them; infinite where none do."""
        return min(map(_num_cpus, self._folders("cpu")), default=inf)

    def _folders(self, controller: str) -> Iterator[Path]:
        """From our own group up to the one that is mounted here, which in a container is its own
        whatever path the host knows it by."""
        for line in self._own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            top = self._root / controller if controllers else self._root
            group = top if ".." in path.split("/") else top / path.lstrip("/")
            above = (one for one in (group, *group.parents) if one.is_relative_to(top))
            yield from (one for one in above if one.is_dir())


def _memory_left(folder: Path) -> float:
    for files in _MEMORY_FILES:
        limit = folder / files.limit
        if limit.exists() and (text := limit.read_text().strip()) != "max":
            used = int((folder / files.used).read_text())
            return int(text) - used + _reclaimable(folder / "memory.stat", files)
    return inf


def _reclaimable(stat: Path, files: _MemoryFiles) -> int:
    """Pages of files that were read, such as weights: a group's use counts them, and the kernel
    takes them back before it fails. Not those that are mapped, which are libraries in use."""
    if not stat.exists():  # as where another kernel than Linux shows the files
        return 0
    lines = (line.split() for line in stat.read_text().splitlines())
    counts = {key: int(value) for key, value in lines}
    cached = counts.get(files.inactive, 0) + counts.get(files.active, 0)
    return max(cached - counts.get(files.mapped, 0), 0)


def _num_cpus(folder: Path) -> float:
    quota, period = folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"  # version 1
    if (both := folder / "cpu.max").exists():
        allowed, of = both.read_text().split()
        return inf if allowed == "max" else int(allowed) / int(of)
    if quota.exists() and (allowed_us := int(quota.read_text())) > 0:
        return allowed_us / int(period.read_text())
    return inf
