"""What a container may take, by the files in which its kernel says so."""

import os
import resource
from math import ceil
from pathlib import Path

import pytest

from engine.control_groups import ControlGroups
from engine.machine import available_memory, num_cpus

MIB = 1 << 20
V2 = "0::/app\n"
V1 = "5:cpu,cpuacct:/app\n4:memory:/app\n0::/\n"
# Of 64 MiB there, 40 were read from files, 8 of them libraries that are mapped.
STAT_V2 = f"anon {24 * MIB}\nfile {40 * MIB}\nfile_mapped {8 * MIB}\nshmem 0\n" + (
    f"inactive_file {30 * MIB}\nactive_file {10 * MIB}\nunevictable 0\n"
)
STAT_V1 = "cache 0\ninactive_file 0\nactive_file 0\nmapped_file 0\n" + (  # of the group alone
    f"total_inactive_file {30 * MIB}\ntotal_active_file {10 * MIB}\ntotal_mapped_file {8 * MIB}\n"
)


def groups(root: Path, own: str, files: dict[str, object]) -> ControlGroups:
    for name, content in files.items():
        path = root / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    (root / "own").write_text(own)
    return ControlGroups(root / "cgroup", root / "own")


def memory_v2(folder: str, limit: object) -> dict[str, object]:
    return {
        f"{folder}memory.max": limit,
        f"{folder}memory.current": 64 * MIB,
        f"{folder}memory.stat": STAT_V2.strip(),
    }


def memory_v1(folder: str, limit: object) -> dict[str, object]:
    return {
        f"memory/{folder}memory.limit_in_bytes": limit,
        f"memory/{folder}memory.usage_in_bytes": 64 * MIB,
        f"memory/{folder}memory.stat": STAT_V1.strip(),
    }


@pytest.mark.parametrize(
    ("own", "files"),
    [
        pytest.param(V2, memory_v2("app/", 100 * MIB), id="v2"),
        pytest.param(V1, memory_v1("app/", 100 * MIB), id="v1"),
        pytest.param("0::/a..b\n", memory_v2("a..b/", 100 * MIB), id="dots in a name"),
        pytest.param("0::/\n", memory_v2("", 100 * MIB), id="v2 in a container"),
        pytest.param(
            "4:memory:/docker/3f5c\n0::/docker/3f5c\n",
            memory_v1("", 100 * MIB),
            id="v1 in a container, by its host's path",
        ),
        pytest.param("0::/../../other\n", memory_v2("", 100 * MIB), id="moved out of its root"),
        pytest.param(
            V2, memory_v2("", 100 * MIB) | memory_v2("app/", "max"), id="limited further up"
        ),
        pytest.param(
            V2, memory_v2("", 100 * MIB) | memory_v2("app/", 200 * MIB), id="the least counts"
        ),
    ],
)
def test_what_was_read_from_files_is_there_to_be_taken(
    tmp_path: Path, own: str, files: dict[str, object]
) -> None:
    """36 MiB below the limit, and 32 that the kernel takes back."""
    assert available_memory(groups(tmp_path, own, files)) == 68 * MIB


@pytest.mark.parametrize(
    ("own", "files"),
    [
        (V2, memory_v2("app/", "max")),
        (V1, memory_v1("app/", 9223372036854771712)),  # how version 1 spells it
        ("0::/\n", {}),
    ],
    ids=["v2", "v1", "no group"],
)
def test_without_a_limit_it_is_the_machines(
    tmp_path: Path, own: str, files: dict[str, object]
) -> None:
    left = available_memory(groups(tmp_path, own, files))
    machine = available_memory(groups(tmp_path, "0::/\n", {}))
    assert left == pytest.approx(machine, rel=0.2), "read twice"
    assert left > 200 * MIB


@pytest.mark.parametrize(
    ("own", "files"),
    [(V2, memory_v2("app/", 100 * MIB)), (V1, memory_v1("app/", 100 * MIB))],
    ids=["v2", "v1"],
)
def test_where_nobody_says_what_was_read_it_is_not_counted(
    tmp_path: Path, own: str, files: dict[str, object]
) -> None:
    told = {name: content for name, content in files.items() if not name.endswith(".stat")}
    assert available_memory(groups(tmp_path, own, told)) == 36 * MIB


def test_nothing_is_left_above_the_limit(tmp_path: Path) -> None:
    assert available_memory(groups(tmp_path, V2, memory_v2("app/", 16 * MIB))) == 0


def cpu_v1(folder: str, quota_us: int) -> dict[str, object]:
    path = f"cpu/{folder}cpu.cfs"
    return {f"{path}_quota_us": quota_us, f"{path}_period_us": 50000}


@pytest.mark.parametrize(
    ("own", "files", "allowed"),
    [
        (V2, {"app/cpu.max": "150000 100000"}, 1.5),
        (V2, {"app/cpu.max": "20000 100000"}, 0.2),
        (V2, {"app/cpu.max": "max 100000"}, 1000),
        (V2, {"app/cpu.max": "max 100000", "cpu.max": "100000 100000"}, 1),
        (V1, cpu_v1("app/", 60000), 1.2),
        (V1, cpu_v1("app/", -1), 1000),
        (V1, cpu_v1("app/", -1) | cpu_v1("", 50000), 1),
        ("0::/\n", {}, 1000),
    ],
)
def test_a_quota_bounds_the_cores(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: str,
    files: dict[str, object],
    allowed: float,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert num_cpus(groups(tmp_path, own, files)) == min(8, ceil(allowed))


def test_a_limit_of_the_address_space_counts() -> None:
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + 64 * MIB, before[1]))
    try:
        left = available_memory()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert 32 * MIB < left <= 64 * MIB
