"""The first start on a machine: who compiles, and what becomes of it where something is missing."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.compile_ahead import compile_ahead
from engine.kernels.cpu.cache import cache_directory, cache_home
from kv_cache.layout import KV_FORMATS

ROOT = Path(__file__).parents[2]
SECONDS = 120.0  # for what takes ten on a machine at rest

# What a process compiles itself is counted where Numba does it.
COUNTED = """
    import logging, sys, tempfile, resource
    import numba
    from numba.core.ccallback import CFunc

    logging.basicConfig(level=logging.INFO)
    compiled_here = []
    compile_uncached = CFunc._compile_uncached

    def counted(self):
        compiled_here.append(self.__name__)
        return compile_uncached(self)

    CFunc._compile_uncached = counted
"""
ENGINE = """
    from engine.config import EngineConfig
    from engine.engine import Engine

    engine = Engine.create(EngineConfig(model="bundled", num_threads=2))
    print(compiled_here)
"""
AHEAD = """
    import torch
    from engine.compile_ahead import compile_ahead
    from kv_cache.layout import KV_FORMATS

    compile_ahead(torch.bfloat16, KV_FORMATS["bf16"])
"""
ONE_KERNEL = """
    from engine.kernels.cpu.team import lead_function

    assert lead_function()
    print(sorted(set(compiled_here)))
"""
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


def start_program(cache: Path, *parts: str) -> "subprocess.Popen[str]":
    program = "".join(map(textwrap.dedent, (COUNTED, *parts)))
    return start(ROOT, "-c", program, NUMBA_CACHE_DIR=str(cache))


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


def is_gone(pid: int) -> bool:
    """Dead; whoever is to reap it may be slow to do so."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


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


def test_engines_that_start_at_once_compile_nothing_themselves(started: Path) -> None:
    for out, err in map(ended, [start_program(started, ENGINE), start_program(started, ENGINE)]):
        assert out == "[]"
        assert "kernels compiled in" in err
    out, err = ended(start_program(started, ENGINE))
    assert out == "[]"
    assert "kernels compiled in" not in err
    before = set(started.rglob("*.nbc"))
    out, err = ended(
        start_program(started, ENGINE.replace("model=", "kv_cache_dtype='int8', model="))
    )
    assert out == "[]"
    assert "kernels compiled in" in err
    new = [path.name.partition("-")[0] for path in set(started.rglob("*.nbc")) - before]
    assert new == ["rotary.rotate_and_write"]


def test_children_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    process = start_program(tmp_path, AHEAD)
    until(partial(somebody_compiles, tmp_path))
    children = children_of(process.pid)
    process.kill()
    process.communicate()
    assert children
    until(lambda: all(map(is_gone, children)))


def test_ctrl_c_ends_the_first_start(tmp_path: Path) -> None:
    words = ("-m", "cluster.cli", "generate", "bundled", "--prompt", "x")
    process = start(ROOT, *words, NUMBA_CACHE_DIR=str(tmp_path))
    until(partial(somebody_compiles, tmp_path))
    children = children_of(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, err
    assert err.endswith("interrupted\n")
    assert "Traceback" not in err
    assert children
    assert all(map(is_gone, children))


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ("sys.executable = '/bin/false'\n", "compiling ended with status 1"),
        ("sys.executable = '/nowhere'\n", "No such file"),
        (
            "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n",
            "cannot be kept on the disk",
        ),
        (
            "tempfile.tempdir = numba.config.CACHE_DIR = '/dev/null'\n",
            "no folder for compiled kernels",
        ),
    ],
)
def test_what_is_not_compiled_ahead_is_compiled_when_it_is_called(
    tmp_path: Path, missing: str, told: str
) -> None:
    out, err = ended(start_program(tmp_path, missing, AHEAD, ONE_KERNEL))
    assert out == "['lead']"
    assert told in err
    assert "compiling in this process" in err


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
