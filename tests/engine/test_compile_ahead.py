"""The first start on a machine: who compiles, and what becomes of it where something is missing."""

import asyncio
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.compile_ahead import MOST_CHILDREN, compile_ahead
from engine.kernels.cpu.cache import cache_directory, cache_home
from engine.machine import num_cpus
from engine.sampler.cpu.launch import cache_part
from kv_cache.layout import KV_FORMATS
from tests.engine.first_start import (
    Step,
    ahead,
    engine,
    false_interpreter,
    no_folder,
    no_interpreter,
    no_room,
    one_kernel,
    quantised_engine,
)
from tests.forked import Forked, forked

ROOT = Path(__file__).parents[2]
SECONDS = 120.0  # for what takes ten on a machine at rest

SHARED = """
    import time
    from functools import partial
    from pathlib import Path
    from engine.compile_child import compile_shared

    def compile_one(name):
        if not Path(name).exists():
            with open("compiled", "a") as compiled:
                print(name, file=compiled)
            time.sleep(0.02)
            Path(name).touch()

    with open("lock", "ab") as locks:
        compile_shared([partial(compile_one, f"kernel-{i}") for i in range(10)], locks)
"""
KERNELS = sorted(f"kernel-{i}\n" for i in range(10))


def start(cwd: Path, *words: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def first_start(cache: Path, *steps: Step) -> AbstractAsyncContextManager[Forked]:
    words = (str(cache), *(step.__name__ for step in steps))
    return forked("tests.engine.first_start", *words, environment={"NUMBA_CACHE_DIR": str(cache)})


async def told(process: Forked) -> tuple[str, str]:
    """What it compiled itself, and its log."""
    async with asyncio.timeout(SECONDS):
        text = (await process.stdout.read()).decode().strip()
        assert await process.wait() == 0, text
    log, _, compiled_here = text.rpartition("\n")
    return compiled_here, log


def start_sharing(folder: Path) -> "subprocess.Popen[str]":
    return start(folder, "-c", textwrap.dedent(SHARED))


def ended(process: "subprocess.Popen[str]") -> tuple[str, str]:
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    return out.strip(), err


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def children_of(pid: int) -> list[int]:
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def compilers_of(pid: int) -> list[int]:
    """Its child, and the two that this has forked."""
    (child,) = children_of(pid)
    until(lambda: len(children_of(child)) == min(MOST_CHILDREN, num_cpus()))
    return [child, *children_of(child)]


def is_gone(pid: int) -> bool:
    """Dead; whoever is to reap it may be slow to do so."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def has_opened(pid: int, file: Path) -> bool:
    return any(opened.resolve() == file for opened in Path(f"/proc/{pid}/fd").iterdir())


def somebody_compiles(cache: Path) -> bool:
    for lock in cache.rglob("lock"):
        with lock.open("ab") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


@pytest.fixture
def started(tmp_path: Path) -> Path:
    """This machine's cache without the kernels that write blocks: all of them take long."""
    home = cache_home()
    assert home is not None
    for kv_format in ("bf16", "int8"):
        compile_ahead(torch.bfloat16, KV_FORMATS[kv_format])
    missing = shutil.ignore_patterns("complete-*", "rotary.*")
    shutil.copytree(cache_directory(home), cache_directory(tmp_path), ignore=missing)
    return tmp_path


async def test_engines_that_start_at_once_compile_nothing_themselves(started: Path) -> None:
    file = cache_directory(started) / cache_part() / "turn"
    with file.open("ab") as turn:
        fcntl.lockf(turn, fcntl.LOCK_EX)
        async with first_start(started, engine) as one, first_start(started, engine) as other:
            until(lambda: has_opened(one.pid, file) and has_opened(other.pid, file))
            fcntl.lockf(turn, fcntl.LOCK_UN)
            for process in (one, other):
                compiled_here, log = await told(process)
                assert compiled_here == "[]"
                assert "kernels compiled in" in log
    before = set(started.rglob("*.code"))
    async with first_start(started, ahead, quantised_engine) as process:
        compiled_here, log = await told(process)
    again, _, quantised = log.partition("step: quantised_engine")
    assert compiled_here == "[]"
    assert "kernels compiled in" not in again
    assert "kernels compiled in" in quantised
    new = [path.name.partition("-")[0] for path in set(started.rglob("*.code")) - before]
    assert new == ["rotary.rotate_and_write"]


async def test_children_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    async with first_start(tmp_path, ahead) as process:
        until(partial(somebody_compiles, tmp_path))
        children = compilers_of(process.pid)
        process.kill()
        await process.wait()
    until(lambda: all(map(is_gone, children)))


def test_ctrl_c_ends_the_first_start(tmp_path: Path) -> None:
    words = ("-m", "cluster.cli", "generate", "bundled", "--prompt", "x")
    process = start(ROOT, *words, NUMBA_CACHE_DIR=str(tmp_path))
    until(partial(somebody_compiles, tmp_path))
    children = compilers_of(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, err
    assert err.endswith("interrupted\n")
    assert "Traceback" not in err
    until(lambda: all(map(is_gone, children)))


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        (false_interpreter, "compiling ended with status 1"),
        (no_interpreter, "No such file"),
        (no_room, "cannot be kept on the disk"),
        (no_folder, "no folder for compiled kernels"),
    ],
)
async def test_what_is_not_compiled_ahead_is_compiled_when_it_is_called(
    tmp_path: Path, missing: Step, reason: str
) -> None:
    async with first_start(tmp_path, missing, ahead, one_kernel) as process:
        compiled_here, log = await told(process)
    assert compiled_here == "['lead']"
    assert reason in log
    assert "compiling in this process" in log


def test_no_kernel_is_compiled_by_two(tmp_path: Path) -> None:
    for process in [start_sharing(tmp_path) for _ in range(3)]:
        ended(process)
    assert sorted((tmp_path / "compiled").open()) == KERNELS


def test_what_another_process_leaves_undone_is_compiled_in_the_end(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("ab") as locks:
        fcntl.lockf(locks, fcntl.LOCK_EX, 1, 3)
        process = start_sharing(tmp_path)
        until((tmp_path / "kernel-9").exists)
        assert not (tmp_path / "kernel-3").exists()
    ended(process)
    assert (tmp_path / "compiled").read_text().splitlines()[-1] == "kernel-3"
    assert sorted((tmp_path / "compiled").open()) == KERNELS
