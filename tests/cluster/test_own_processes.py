"""No process of a cluster outlives the command that started it, however that ends."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from cluster.front_folder import new_folder
from cluster.ray_cluster import front_settings

COMMAND = """
import os, subprocess, sys
from pathlib import Path
from cluster import front_folder
from cluster.own_processes import own_processes

front_folder.PLACE = Path(os.environ.get("FRONTS", front_folder.PLACE))
cannot_be = Path(sys.executable, "a-file-in-a-file")
with own_processes([cannot_be, Path(sys.argv[1]), Path(sys.argv[1] + ".never")]) as folder:
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print(folder, flush=True)
    sys.stdin.readline()
"""
AGAIN = """
import os, subprocess, sys
from cluster.own_processes import begin_again, own_processes

child = os.environ.get("CHILD")
print(os.getpid(), sys.argv[1], os.environ.get("KVRELAY_CLUSTER"), flush=True)
if child:
    sys.exit(3 if os.path.exists(f"/proc/{child}") else 0)
environment = dict(os.environ)
holds = "import sys; held = bytearray(b'x') * 300_000_000; print(flush=True); sys.stdin.read()"
with own_processes():
    words, pipe = [sys.executable, "-c", holds], subprocess.PIPE
    child = subprocess.Popen(words, stdin=pipe, stdout=pipe, start_new_session=True)
    child.stdout.readline()
    environment["CHILD"] = str(child.pid)
    begin_again(environment)
"""
# Whose environments say nothing, as of Ray's agents: one that logs into the folder of a session of
# the command's, as it does itself, one of an older command's of the same number, and somebody who
# reads the log.
AGENTS = """
import os, shutil, subprocess, sys
from datetime import datetime, timedelta
from pathlib import Path
from cluster.own_processes import own_processes

with own_processes():
    for age, title in ((0, "ray::Agent"), (1, "ray::Agent"), (0, "tail")):
        began = (datetime.now() - timedelta(days=age)).strftime("session_%Y-%m-%d_%H-%M-%S_%f")
        logs = Path(sys.argv[1], f"{began}_{os.getpid()}", "logs")
        logs.mkdir(parents=True)
        with open(logs / "agent.log", "w") as log:
            words, program = [title, "1000"], shutil.which("sleep")
            print(subprocess.Popen(words, executable=program, env={}, stderr=log).pid, flush=True)
    own = open(max(Path(sys.argv[1]).glob("session_*/logs/*")))
    sys.stdin.readline()
"""
GONE_S = 60.0
NODE_ID = "a" * 56  # of Ray's: Serve puts a folder of its name between
HAPROXY_TAKES = 97  # letters, of a path that it binds


@pytest.mark.parametrize(("is_killed", "status"), [(True, -9), (False, 0)])
def test_what_a_command_started_ends_with_it(is_killed: bool, status: int, tmp_path: Path) -> None:
    """With whoever sees to that: all of them have the command's output open."""
    file = tmp_path / "secret"
    file.touch()
    words = [sys.executable, "-c", COMMAND, str(file)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as command:
        assert command.stdout is not None
        folder = Path(command.stdout.readline().strip())
        assert folder.is_dir()
        if is_killed:
            command.kill()
        command.communicate("" if is_killed else "\n", timeout=GONE_S)
    assert command.returncode == status
    assert not folder.exists()
    assert not file.exists()


@pytest.mark.parametrize(("is_killed", "status"), [(True, -9), (False, 0)])
def test_a_process_with_nothing_of_ours_but_its_logs_ends_too(
    is_killed: bool, status: int, tmp_path: Path
) -> None:
    words, pipe = [sys.executable, "-c", AGENTS, str(tmp_path)], subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as command:
        assert command.stdin is not None
        assert command.stdout is not None
        agents = [os.pidfd_open(int(command.stdout.readline())) for _ in range(3)]
        ours, *others = agents
        try:
            if is_killed:
                command.kill()
            command.stdin.close()
            assert command.wait(GONE_S) == status
            assert select.select([ours], [], [], GONE_S)[0]
            assert not select.select(others, [], [], 0)[0]
        finally:
            for agent in agents:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(agent, signal.SIGKILL)
                os.close(agent)


def test_a_folder_whose_guard_is_killed_too_goes_with_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which leaves all else: what runs, what is not ours, and what may run on another host."""
    monkeypatch.setenv("FRONTS", str(tmp_path))
    users, elsewhere = tmp_path / "kvrelay-front-of-a-user", tmp_path / "kvrelay-front-elsewhere"
    for folder, said in ((users, "what it is about"), (elsewhere, "another boot's\n")):
        folder.mkdir()
        (folder / "owner.lock").write_text(said)
    (tmp_path / "kvrelay-front-empty").mkdir()
    (tmp_path / "kvrelay-front-file").touch()
    kept = set(tmp_path.iterdir())
    words = [sys.executable, "-c", COMMAND, str(tmp_path / "secret")]
    with ExitStack() as commands:
        started = [commands.enter_context(running(words)) for _ in range(3)]
        (killed, left), (orphan, guarded), (_, other) = started
        (tmp_path / "kvrelay-front-link").symlink_to(left)
        kept.add(tmp_path / "kvrelay-front-link")
        with stopped(guard_of(guarded)):
            kill(guard_of(left))  # before what it guards, or it might have begun to remove that
            killed.kill()
            orphan.kill()
            killed.wait(GONE_S)
            orphan.wait(GONE_S)
            assert left.is_dir()
            subprocess.run(words, input="\n", stdout=subprocess.PIPE, text=True, timeout=GONE_S)
            assert set(tmp_path.iterdir()) == {guarded, other, *kept}, "a guard owns it as well"
        orphan.communicate(timeout=GONE_S)
        os.kill(sleeper_of(left), signal.SIGKILL)
    assert set(tmp_path.iterdir()) == kept


def test_a_front_s_sockets_have_room_wherever_temporary_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder, lock = new_folder()
    with ExitStack() as ports:
        ports.callback(shutil.rmtree, folder)
        ports.callback(os.close, lock)
        for path in map(Path, front_settings(folder, ports).values()):
            if path.suffix == ".sock":
                assert len(str(path.parent / NODE_ID / path.name)) <= HAPROXY_TAKES


def kill(pid: int) -> None:
    """Afterwards it owns nothing any more."""
    watch = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        assert select.select([watch], [], [], GONE_S)[0]
    finally:
        os.close(watch)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def running(words: list[str]) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A command and its folder."""
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as command:
        assert command.stdout is not None
        yield command, Path(command.stdout.readline().strip())
        if command.poll() is None:
            command.communicate("\n", timeout=GONE_S)


def guard_of(folder: Path) -> int:
    """Who is told of it in words; what it guards has it in the environment."""
    return the_one("cmdline", folder)


def sleeper_of(folder: Path) -> int:
    return the_one("environ", folder)


def the_one(file: str, folder: Path) -> int:
    """It may have begun a moment ago, and the kernel does not tell of it yet."""
    deadline = time.monotonic() + GONE_S
    while not (found := those_with(file, folder)):
        assert time.monotonic() < deadline, folder
        time.sleep(0.01)
    (pid,) = found
    return pid


def those_with(file: str, folder: Path) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if str(folder).encode() in (entry / file).read_bytes():
                found.append(int(entry.name))
    return found


def test_a_command_begins_again_as_if_it_had_not_begun() -> None:
    """In the same process, as whoever has started it waits for that one. What it had started is
    gone, be there much memory to give back, as Ray's processes have."""
    words = [sys.executable, "-c", AGAIN, "word"]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=GONE_S)
    assert done.returncode == 0, "what it had started is there, if only as a zombie"
    first, second = done.stdout.splitlines()
    assert first == second
    assert first.endswith(" word None")
