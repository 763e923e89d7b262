"""Faults happen where and when they were asked for."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kv_transfer.errors import TransferError
from kv_transfer.faults import FaultError, Faults


class Watched(Faults):
    """Tells how often it has looked for what is asked for now."""

    num_looks = 0

    def _asked(self) -> str:
        self.num_looks += 1
        return super()._asked()

    def looks_again(self, waiting: threading.Thread) -> None:
        """A few times, which `waiting` does while it is held."""
        enough = self.num_looks + 3
        while waiting.is_alive() and self.num_looks < enough:
            waiting.join(0.005)


def test_nothing_happens_unasked() -> None:
    faults = Faults()
    assert [faults.reach("holder.chunk") for _ in range(3)] == [None] * 3


def test_an_action_happens_at_its_time_and_once() -> None:
    faults = Faults("holder.chunk:2=release holder.commit=fail")
    assert [faults.reach("holder.chunk") for _ in range(3)] == [None, "release", None]
    with pytest.raises(TransferError, match=r"holder\.commit"):
        faults.reach("holder.commit")
    assert faults.reach("holder.commit") is None


@pytest.mark.parametrize("text", ["chunk", "chunk=", "=kill", "chunk:x=kill"])
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(FaultError, match="POINT"):
        Faults(text)


def test_kill_is_a_kill() -> None:
    program = "from kv_transfer.faults import Faults; Faults.of_environment().reach('here')"
    result = subprocess.run(
        [sys.executable, "-c", program], env={"KVRELAY_FAULTS": "here=kill"}, check=False
    )
    assert result.returncode == -9


def test_a_file_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    file = tmp_path / "faults"
    file.write_text("here=first")
    faults = Faults(f"@{file}")
    assert [faults.reach("here") for _ in range(2)] == ["first", None]
    file.write_text("here:2=second")
    assert [faults.reach("here") for _ in range(3)] == [None, "second", None]


def test_who_is_stuck_is_so_until_other_faults_are_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "faults"
    file.write_text("here=stuck")
    faults = Watched(f"@{file}")
    assert faults.reach("here") == "stuck"
    holding = threading.Thread(target=faults.stuck())
    holding.start()
    faults.looks_again(holding)
    assert holding.is_alive()
    file.write_text("")
    holding.join(30)
    assert not holding.is_alive()


def test_who_is_held_is_so_until_other_faults_are_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "faults"
    file.write_text("here=hold")
    faults = Watched(f"@{file}")
    held = threading.Thread(target=faults.reach, args=["here"])
    held.start()
    while not caplog.messages:
        held.join(0.01)
    faults.looks_again(held)
    assert held.is_alive()
    assert caplog.messages == ["held at here"]
    file.write_text("")
    held.join(30)
    assert not held.is_alive()


def test_who_is_slow_rests_before_each_step_until_other_faults_are_asked_for(
    tmp_path: Path,
) -> None:
    file = tmp_path / "faults"
    file.write_text("here=slow")
    faults = Faults(f"@{file}")
    steps: list[Callable[[object], None]] = []
    faults.hold_up(faults.reach("here"), steps.append)
    for _ in range(3):
        (rest,) = steps
        steps.clear()
        rest(None)
    file.write_text("")
    steps.pop()(None)
    assert steps == []


def test_the_same_words_written_again_count_anew(tmp_path: Path) -> None:
    file = tmp_path / "faults"
    faults = Faults(f"@{file}")
    for written_ns in (1, 2):
        file.write_text("here=slow")
        os.utime(file, ns=(written_ns, written_ns))
        assert [faults.reach("here") for _ in range(2)] == ["slow", None]


class Overtaken(Faults):
    """Another thread reaches a point between two steps of the first one's reading of the file."""

    other: threading.Thread | None = None
    told: str | None = None

    def _read(self, text: str) -> None:
        if self.other is None:
            self.other = threading.Thread(target=self._reach)
            self.other.start()
            self.other.join(0.2)
        super()._read(text)

    def _reach(self) -> None:
        self.told = self.reach("here")


def test_two_threads_that_read_a_file_at_once_count_together(tmp_path: Path) -> None:
    file = tmp_path / "faults"
    file.write_text("here=slow here:2=twice")
    faults = Overtaken(f"@{file}")
    told = faults.reach("here")
    assert faults.other is not None
    faults.other.join(30)
    assert [told, faults.told] == ["slow", "twice"]
