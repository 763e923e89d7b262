"""The first start on a machine: kernels are compiled by child processes, before the weights come.

A process that has compiled stays 110 MB larger. The children fill the cache on the disk, from
which this process then loads. Whatever goes wrong there, it compiles what it misses when it
calls it.

The children end with this process, however it ends: their standard input is a pipe from it. They
are no part of the terminal's process group, so Ctrl-C reaches this process alone.
"""

import fcntl
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch

from engine.kernels.cpu.cache import cache_directory, cache_home, complete_marker
from engine.kernels.cpu.features import CpuFeatures
from engine.machine import num_cpus
from engine.sampler.cpu.launch import cache_part
from kv_cache.layout import KV_FORMATS, KvFormat

logger = logging.getLogger(__name__)

MOST_CHILDREN = 2  # the sampler alone takes half of the CPU time, so more would not be faster
DEADLINE_S = 300.0  # for some 15 s of CPU time; where it takes longer, something is stuck
_LOOK_S = 0.1  # between two looks whether another engine is done


class CompileError(Exception):
    """A child did not do its work."""


def compile_ahead(dtype: torch.dtype, kv_format: KvFormat) -> None:
    """Returns when the kernels for a model of this type and such a cache are on the disk, or
    cannot be."""
    home = cache_home()
    if home is None:
        logger.warning("no folder for compiled kernels; compiling in this process")
        return
    folder = cache_directory(home) / cache_part()
    element = CpuFeatures.of_this_machine().element(dtype)
    kinds = f"{element}-{kv_format.name}" if kv_format.quantised else element
    marker = complete_marker(folder, kinds)
    if marker.exists():
        return
    started = time.monotonic()
    num_children = min(MOST_CHILDREN, num_cpus())
    logger.info("compiling kernels, once on a machine, in %d processes", num_children)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _turn(folder / "turn"):
            if not marker.exists():
                _run_children(num_children, home, folder / "lock", dtype, kv_format)
                marker.touch()
    except (OSError, CompileError) as error:
        logger.warning("%s; compiling in this process instead", error)
    else:
        logger.info("kernels compiled in %.1f s", time.monotonic() - started)


@contextmanager
def _turn(file: Path) -> Iterator[None]:
    """Of engines that start at once, one has children: those of the others would wait for its
    kernels, with torch in memory, for which it takes 3 s of CPU time. The turn of an engine that
    is killed is over, and one that takes too long is not waited for."""
    deadline = time.monotonic() + DEADLINE_S
    with file.open("ab") as turn:
        while time.monotonic() < deadline:
            try:
                fcntl.lockf(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):  # systems differ
                time.sleep(_LOOK_S)
        yield


def _run_children(
    num: int, home: Path, lock: Path, dtype: torch.dtype, kv_format: KvFormat
) -> None:
    deadline = time.monotonic() + DEADLINE_S
    with (
        tempfile.TemporaryFile() as errors,
        _first_child(num, home, lock, dtype, kv_format, errors) as child,
    ):
        try:
            status = child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            raise CompileError(f"compiling has not ended within {DEADLINE_S:g} s") from error
        if status:
            errors.seek(0)
            last_words = errors.read().decode(errors="replace").splitlines()[-1:]
            raise CompileError(f"compiling ended with status {status} {last_words}")


@contextmanager
def _first_child(
    num: int, home: Path, lock: Path, dtype: torch.dtype, kv_format: KvFormat, errors: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """It forks the others, which are of its process group."""
    name = str(dtype).removeprefix("torch.")
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; from engine.compile_child import main;"
        f" main({name!r}, {kv_format.name!r}, {str(lock)!r}, {num})"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        # numpy would start threads, with which no process should be forked
        env={**os.environ, "NUMBA_CACHE_DIR": str(home), "OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        process_group=0,
    ) as child:
        try:
            yield child
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)


def main() -> None:
    """For a model in bf16, as most are: `python -m engine.compile_ahead`."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    compile_ahead(torch.bfloat16, KV_FORMATS["bf16"])


if __name__ == "__main__":
    main()
