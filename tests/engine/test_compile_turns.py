"""Of engines that start at once on a machine, one has children that compile."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine import compile_ahead
from engine.kernels.cpu.cache import cache_directory
from engine.sampler.cpu.launch import cache_part
from kv_cache.layout import KV_FORMATS

HOLD = """
import fcntl, sys

with open(sys.argv[1], "ab") as turn:
    fcntl.lockf(turn, fcntl.LOCK_EX)
    print(flush=True)
    sys.stdin.read()
"""
LOOKS_S = 1.0  # ten looks whether another is done


class Start:
    """Of an engine, on a machine where nothing is compiled."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiled: list[int] = []
        self._folder = cache_directory(home) / cache_part()
        self._folder.mkdir(parents=True)
        monkeypatch.setattr(compile_ahead, "cache_home", lambda: home)
        monkeypatch.setattr(compile_ahead, "_run_children", self._run_children)

    def _run_children(self, num: int, *_: object) -> None:
        self.compiled.append(num)

    @contextmanager
    def while_another_compiles(self) -> Iterator[None]:
        """Looks on for a while, and returns when this one is through."""
        words = [sys.executable, "-c", HOLD, str(self._folder / "turn")]
        engine = threading.Thread(target=self.compile)
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            assert other.stdout.readline()
            engine.start()
            engine.join(LOOKS_S)
            assert engine.is_alive()
            yield
            other.kill()
        engine.join(60)
        assert not engine.is_alive()

    def compile(self) -> None:
        compile_ahead.compile_ahead(torch.float32, KV_FORMATS["fp32"])

    def marks(self) -> list[Path]:
        return list(self._folder.glob("complete-*"))


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    return Start(tmp_path, monkeypatch)


def test_what_another_has_compiled_is_not_compiled_again(start: Start) -> None:
    start.compile()
    (complete,) = start.marks()
    complete.unlink()
    start.compiled.clear()
    with start.while_another_compiles():
        complete.touch()
    assert not start.compiled


def test_what_another_has_left_is_compiled(start: Start) -> None:
    with start.while_another_compiles():
        assert not start.compiled
    assert len(start.compiled) == 1
    assert start.marks()


def test_one_that_is_stuck_is_not_waited_for(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    waited_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: waited_s, sleep=time.sleep)
    monkeypatch.setattr(compile_ahead, "time", clock)
    with start.while_another_compiles():
        assert not start.compiled
        waited_s = compile_ahead.DEADLINE_S
        for _ in range(100):
            if start.compiled:
                break
            threading.Event().wait(LOOKS_S / 10)
        assert start.compiled
