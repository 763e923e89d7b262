"""A process as it starts for the first time on a machine, forked from one that has imported it all.

Its words are the folder of compiled kernels and what it does, one step after the other. It logs to
its standard output; the last line is what it compiled itself, counted where Numba does it.
"""

import logging
import os
import resource
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numba
import torch
from numba.core import ccallback

from engine.compile_ahead import compile_ahead
from engine.config import EngineConfig
from engine.engine import Engine
from engine.kernels.cpu.team import lead_function
from kv_cache.layout import KV_FORMATS


def no_interpreter() -> None:
    sys.executable = "/nowhere"


def false_interpreter() -> None:
    sys.executable = "/bin/false"


def no_room() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))


def no_folder() -> None:
    tempfile.tempdir = numba.config.CACHE_DIR = "/dev/null"


def ahead() -> None:
    compile_ahead(torch.bfloat16, KV_FORMATS["bf16"])


def engine() -> None:
    Engine.create(EngineConfig(model="bundled", num_threads=2))


def quantised_engine() -> None:
    Engine.create(EngineConfig(model="bundled", num_threads=2, kv_cache_dtype="int8"))


def one_kernel() -> None:
    assert lead_function()


Step = Callable[[], None]
STEPS: dict[str, Step] = {
    step.__name__: step
    for step in (
        no_interpreter,
        false_interpreter,
        no_room,
        no_folder,
        ahead,
        engine,
        quantised_engine,
        one_kernel,
    )
}


def main() -> None:
    os.dup2(1, 2)  # a file would have no room for it either
    numba.config.CACHE_DIR = sys.argv[1]
    logging.basicConfig(level=logging.INFO)
    compiled_here: set[str] = set()
    callback: Any = ccallback.CFunc
    compile_uncached = callback._compile_uncached

    def counted(self: Any) -> Any:
        compiled_here.add(self.__name__)
        return compile_uncached(self)

    callback._compile_uncached = counted
    for step in sys.argv[2:]:
        logging.info("step: %s", step)
        STEPS[step]()
    sys.stdout.write(f"{sorted(compiled_here)}\n")
