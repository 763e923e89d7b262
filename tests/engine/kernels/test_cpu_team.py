"""The threads under the compiled kernels, and the compiled code that is kept on disk."""

import asyncio
import ctypes
import os
import shutil
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
import torch
from numba.core.registry import cpu_target

from engine.kernels.cpu.activations import WORDS, gated_activation
from engine.kernels.cpu.cache import cache_directory, cache_home, complete_marker, prepare
from engine.kernels.cpu.compiled import compiled
from engine.kernels.cpu.kept import DIGEST_BYTES, Kept
from engine.kernels.cpu.kernel import Kernel
from engine.kernels.cpu.kernels import CpuKernels
from engine.kernels.cpu.memory import CODE_WORD, MAILBOX_WORD, OWN_WORDS, SEATS_WORD
from engine.kernels.cpu.team import CALLERS_ASLEEP, SLEEPERS, TEAM, Team, lead_function
from engine.kernels.interface import Activation
from engine.kernels.reference import ReferenceKernels
from tests.engine.kernels.slow_workers import SlowWorkers
from tests.forked import forked
from tests.processes import python
from tests.waiting import until


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def activated(kernels: CpuKernels, x: torch.Tensor) -> torch.Tensor:
    return kernels.gated_activation(x, Activation.SILU)


@pytest.mark.usefixtures("four_threads")
def test_every_piece_is_done_whatever_the_number_of_threads() -> None:
    kernels, x = CpuKernels(), torch.randn(512, 512)
    expected = ReferenceKernels().gated_activation(x, Activation.SILU)
    for _ in range(300):
        torch.testing.assert_close(activated(kernels, x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("four_threads")
def test_engines_of_one_process_compute_at_once() -> None:
    expected = ReferenceKernels()
    wrong: list[int] = []

    def compute(seed: int) -> None:
        kernels = CpuKernels()
        x = torch.randn(256, 512, generator=torch.Generator().manual_seed(seed))
        right = expected.gated_activation(x, Activation.SILU)
        for _ in range(200):
            if not torch.allclose(activated(kernels, x), right, rtol=1e-5, atol=1e-5):
                wrong.append(seed)

    threads = [Thread(target=compute, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_team_that_is_taken_gives_no_workers_to_others() -> None:
    assert TEAM.take(0) == 0
    workers = TEAM.take(1)
    try:
        assert workers == 1
        assert TEAM.take(1) == 0
    finally:
        TEAM.give_back()


def test_a_call_that_is_wrong_gives_its_workers_back() -> None:
    kernel = Kernel(gated_activation, "f32", WORDS)
    with pytest.raises(struct.error):
        kernel(2, *[0.5] * 6)
    assert TEAM.take(1) == 1
    TEAM.give_back()


@pytest.mark.usefixtures("four_threads")
def test_a_forked_child_makes_workers_of_its_own() -> None:
    kernels, x = CpuKernels(), torch.randn(512, 512)
    expected = activated(kernels, x).numpy().tobytes()
    child = os.fork()
    if child == 0:  # no torch operation here: its OpenMP does not survive a fork
        right = activated(kernels, x).numpy().tobytes() == expected and TEAM.num_workers == 3
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_workers_that_sleep_end_when_they_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    team, told = Team(), []
    assert team.take(3) == 3
    team.give_back()
    while ctypes.c_int64.from_address(team.address + SLEEPERS).value < 3:
        time.sleep(0.001)
    lead = lead_function()
    monkeypatch.setattr(
        "engine.kernels.cpu.team.lead_function", lambda: lambda job: told.append(lead(job))
    )
    team.close()
    assert len(told) == 1
    assert team.num_workers == 0


async def test_who_waits_for_a_slow_worker_leaves_it_the_core() -> None:
    team, slow = Team(), SlowWorkers()
    job = (ctypes.c_int64 * OWN_WORDS)()
    job[MAILBOX_WORD], job[CODE_WORD], job[SEATS_WORD] = team.address, slow.code, team.take(1)
    asleep = ctypes.c_int64.from_address(team.address + CALLERS_ASLEEP)
    caller = asyncio.create_task(asyncio.to_thread(lead_function(), ctypes.addressof(job)))
    await until(lambda: asleep.value == 1)
    slow.go_on.set()
    await caller
    assert asleep.value == 0
    team.give_back()
    team.close()


PROGRAM = "tests.engine.kernels.kept"


async def cache_hits(cache: Path, **more: str) -> int:
    environment = {"XDG_CACHE_HOME": str(cache), **more}
    async with forked(PROGRAM, environment=environment) as process, asyncio.timeout(120):
        out = await process.stdout.read()
        assert await process.wait() == 0
    return int(out.split()[0])


async def test_a_second_process_loads_what_the_first_ones_compiled(tmp_path: Path) -> None:
    await asyncio.gather(cache_hits(tmp_path), cache_hits(tmp_path))
    async with python("-m", PROGRAM, XDG_CACHE_HOME=str(tmp_path)) as (_, line):
        assert line == "1 False", "nor has it anything to compile with"


@pytest.mark.parametrize("length", [0, DIGEST_BYTES, 5000])
def test_what_a_crash_has_left_of_a_kernel_is_not_loaded(tmp_path: Path, length: int) -> None:
    kept = a_kept_kernel(tmp_path)
    assert kept.load_overload(None, cpu_target.target_context) is not None
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for left in (whole[:length], whole[:length] + bytes(len(whole) - length)):
        file.write_bytes(left)
        assert kept.load_overload(None, cpu_target.target_context) is None


def test_the_kernels_of_unlike_cpus_lie_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = a_kept_kernel(tmp_path)
    monkeypatch.setattr("engine.kernels.cpu.kept.this_cpu", lambda: "another")
    there = Kept(tmp_path, gated_activation, "f32")
    assert there.load_overload(None, cpu_target.target_context) is None
    assert here.load_overload(None, cpu_target.target_context) is not None


def a_kept_kernel(folder: Path) -> Kept:
    """A copy of what this machine has."""
    home = cache_home()
    assert home is not None
    assert compiled(gated_activation, "f32").address
    kept = Kept(folder, gated_activation, "f32")
    own = Kept(cache_directory(home), gated_activation, "f32")
    shutil.copy(own.file, kept.file)
    return kept


async def test_without_a_home_kernels_are_kept_with_temporary_files(tmp_path: Path) -> None:
    place, temporary = tmp_path / "a-file", tmp_path / "temporary"
    place.write_text("not a directory")
    temporary.mkdir()
    temporary.chmod(0o2700)  # whose folders have its group
    assert await cache_hits(place, TMPDIR=str(temporary)) == 0
    (home,) = temporary.iterdir()
    assert stat.S_IMODE(home.stat().st_mode) == 0o2700
    assert await cache_hits(place, TMPDIR=str(temporary)) == 1


@pytest.mark.parametrize("whose", ["open", "linked", "somebody else's"])
def test_no_kernels_are_run_that_others_may_have_written(
    whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("engine.kernels.cpu.cache.numba.config.CACHE_DIR", "/dev/null")
    home = cache_home.__wrapped__()
    assert home == tmp_path / f"kvrelay-kernels-{os.getuid()}"
    match whose:
        case "open":
            home.chmod(0o770)
        case "linked":
            home.symlink_to(home.rename(tmp_path / "elsewhere"))
        case _:
            another = os.getuid() + 1
            home.rename(tmp_path / f"kvrelay-kernels-{another}")
            monkeypatch.setattr("os.getuid", lambda: another)
    assert cache_home.__wrapped__() is None


def test_a_cache_that_cannot_be_written_will_do_if_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(home: Path) -> None:
        raise OSError(f"read-only file system: {home}")

    monkeypatch.setattr("engine.kernels.cpu.cache.prepare", refuse)
    monkeypatch.setattr("engine.kernels.cpu.cache.numba.config.CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("engine.kernels.cpu.cache._temporary_home", lambda: None)
    part = cache_directory(tmp_path) / "a part"
    part.mkdir(parents=True)
    complete_marker(part, "f32").with_suffix(".of-another-cpu").touch()
    assert cache_home.__wrapped__() is None
    complete_marker(part, "f32").touch()
    assert cache_home.__wrapped__() == tmp_path


def test_the_cache_is_named_after_the_sources(tmp_path: Path) -> None:
    assert cache_directory(tmp_path).parent == tmp_path / "kvrelay"
    assert cache_directory(tmp_path).name.startswith("kernels-")


def test_kernels_that_nothing_has_used_for_long_are_removed(tmp_path: Path) -> None:
    own = cache_directory(tmp_path)
    recent, old, foreign = (own.parent / n for n in ("kernels-a", "kernels-b", "models"))
    for place in (own, recent, old, foreign):
        place.mkdir(parents=True)
        (place / "file").write_text("")
    for place in (own, old, foreign):
        os.utime(place, (0, 0))
    prepare(tmp_path)
    assert recent.exists()
    assert foreign.exists()
    assert not old.exists()
    assert (own / "file").exists()
    assert own.stat().st_mtime > 0
