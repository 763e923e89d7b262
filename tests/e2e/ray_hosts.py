"""Ray on `hosts`, each started there by hand as deploy/serve.yaml says, and our application on
them."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.hosts import HOME, ROOT, Host, Lan

FRONT = "http://127.0.0.1:8000"
PORT = 6379
DEPLOYED_S = 240.0
_BIN = Path(sys.executable).parent
_CONFIG = f"{HOME}/serve.yaml"


def settings() -> dict[str, str]:
    """What deploy/serve.yaml says to export before `ray start`, as a shell would read it."""
    said = (ROOT / "deploy/serve.yaml").read_text()
    words = re.findall(r"^#   (RAY_\w+)=(?:\$'(.*?)'|(\S+))", said, re.MULTILINE)
    return {name: quoted.replace(r"\n", "\n") or plain for name, quoted, plain in words}


class RayHosts:
    """The first host is the head, where the front and the clients are."""

    def __init__(self, lan: Lan, roles: Mapping[str, str], *, start: bool = True) -> None:
        """`roles`: of each host's name. Without `start`, something else starts Ray there."""
        self.lan = lan
        self.head, *self.others = lan.hosts
        self._roles = roles
        self.environment = {
            **settings(),
            "PATH": f"{_BIN}:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "token",
            "RAY_USAGE_STATS_ENABLED": "0",
            "KVRELAY_SECRET": secrets.token_urlsafe(32),
            "KVRELAY_API_KEYS": secrets.token_urlsafe(32),
        }
        if "NUMBA_CACHE_DIR" in os.environ:  # what this machine has compiled already
            self.environment["NUMBA_CACHE_DIR"] = os.environ["NUMBA_CACHE_DIR"]
        if start:
            self._start_all()

    def _start_all(self) -> None:
        self.start_head()
        token = self.run(self.head, "cat", f"{HOME}/.ray/auth_token")
        for host in self.others:
            host.write(f"{HOME}/.ray/auth_token", token)
            self.join(host)

    def start_head(self) -> None:
        self.run(self.head, "ray", "get-auth-token", "--generate")
        self._start(self.head, "--head", f"--port={PORT}")

    def run(self, host: Host, *command: str, timeout_s: float = 120) -> str:
        return host.run(*command, timeout_s=timeout_s, **self.environment)

    def join(self, host: Host) -> None:
        self._start(host, f"--address={self.lan.address(self.head)}:{PORT}")

    def _start(self, host: Host, *words: str) -> None:
        labels = f"--labels=kvrelay-role={self._roles[host.name]}"
        small = ("--num-cpus=4", "--object-store-memory=100000000")
        self.run(host, "ray", "start", *words, labels, *small)

    def deploy(
        self, args: Mapping[str, Any], *, front_host: str = "127.0.0.1", grpc: bool = False
    ) -> None:
        """Returns when all that was asked for is there. `grpc`: with the file's lines about it."""
        text = (ROOT / "deploy/serve.yaml").read_text()
        if grpc:
            text = re.sub(
                r"^# (grpc_options|  port: 9000|  grpc_servicer)", r"\1", text, flags=re.M
            )
        config = yaml.safe_load(text)
        config["http_options"]["host"] = front_host
        config["applications"][0]["args"] = dict(args)
        self.head.write(_CONFIG, yaml.safe_dump(config))
        self.run(self.head, "serve", "deploy", _CONFIG)
        wait_until(self.is_ready, DEPLOYED_S, lambda: self.run(self.head, "serve", "status"))

    def is_ready(self) -> bool:
        said = self.run(self.head, "serve", "status")
        if "DEPLOY_FAILED" in said:
            logs = "tail -n 20 /tmp/ray/session_latest/logs/worker-*.err"
            raise RuntimeError(said + self.run(self.head, "sh", "-c", logs))
        running = yaml.safe_load(said)["applications"].get("kvrelay", {}).get("status")
        return running == "RUNNING" and self.answers("/ready") == "200"

    def answers(self, path: str) -> str:
        """The status, by curl on the head; 000 without one."""
        key = f"Authorization: Bearer {self.environment.get('KVRELAY_API_KEYS', '')}"
        words = ("curl", "-s", "-m", "30", "-o", "/dev/null", "-w", "%{http_code}", "-H", key)
        return self.run(self.head, "sh", "-c", '"$@" || true', "-", *words, FRONT + path)

    def complete(self, prompt: str) -> str:
        """What the front answers, by curl on the head."""
        body = json.dumps({"prompt": prompt, "max_tokens": 16, "ignore_eos": True})
        return self._curl("/v1/completions", "--json", body)

    def num_drawn(self) -> dict[str, float]:
        """Tokens, by the pool and the replica that drew them."""
        return {
            f"{sample.labels['pool']} {sample.labels['replica']}": sample.value
            for family in text_string_to_metric_families(self._curl("/metrics"))
            for sample in family.samples
            if sample.name == "kvrelay:drawn_tokens_total"
        }

    def _curl(self, path: str, *words: str) -> str:
        key = f"Authorization: Bearer {self.environment.get('KVRELAY_API_KEYS', '')}"
        curl = ("curl", "-sS", "-f", "-m", "60", "-H", key)
        return self.run(self.head, *curl, *words, FRONT + path)

    def status(self) -> str:
        """What `kvrelay status` shows."""
        address = f"{self.lan.address(self.head)}:{PORT}"
        return self.run(self.head, "env", f"RAY_ADDRESS={address}", "kvrelay", "status")

    def checked_status(self) -> str:
        """The same. RuntimeError where blocks go from host to host by anything but `socket`: there
        is no RDMA, and UCX's emulation of READ over TCP is not to be used."""
        said = self.status()
        links = re.findall(r"^(\S+):\d+ from (\S+):\d+ +(\S+)", said, re.MULTILINE)
        across = {connector for one, other, connector in links if one != other}
        if not links or across - {"socket"}:
            raise RuntimeError(f"links: {said}")
        return said

    def start(self, host: Host, *command: str) -> subprocess.Popen[str]:
        return host.start(*command, **self.environment)


def wait_until(
    condition: Callable[[], bool], timeout_s: float, why: Callable[[], str] = lambda: ""
) -> float:
    """How long it took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() > began + timeout_s:
            raise TimeoutError(f"not within {timeout_s:g} s: {why()}")
        time.sleep(0.2)
    return time.monotonic() - began
