"""`ray up` and `ray down` of deploy/ray-local.yaml for real: over ssh, to hosts of our own.

python -m tests.e2e.ray_up    as root, with sshd and rsync (Debian: openssh-server, rsync)

Never outside of such hosts: both run `ray stop`, which ends every Ray process that it sees.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import yaml

from tests.e2e.hosts import HOME, ROOT, Host, Lan
from tests.e2e.ray_hosts import RayHosts, wait_until
from tests.e2e.telling import say

ROLES = {"head": "head", "first": "prefill", "second": "decode"}
UP_S, DOWN_S, GONE_S = 300.0, 120.0, 180.0
_FILE = f"{HOME}/ray-local.yaml"
_OF_THE_USER = ("PATH", "RAY_USAGE_STATS_ENABLED")
_KEY = f"{HOME}/.ssh/id_ed25519"
_WHEEL = f"{HOME}/dist"  # what `make wheel` leaves in dist
_SITE = f"{HOME}/site"
# What the wheel depends on is there; the machine that all hosts are on stays as it is.
_PIP = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_TARGET": _SITE, "PYTHONPATH": _SITE}


def main() -> None:
    with Lan(list(ROLES)) as lan:
        hosts = RayHosts(lan, ROLES, start=False)
        _let_in(hosts)
        head = hosts.head
        head.write(_FILE, yaml.safe_dump(config(hosts)))
        hosts.run(head, "python", "-m", "tests.deploy.wheel", _WHEEL)
        before = {host.name: _processes(host) for host in lan.hosts}
        began = time.monotonic()
        hosts.run(head, "ray", "up", "--yes", "--no-config-cache", _FILE, timeout_s=UP_S)
        say(f"ray up took {time.monotonic() - began:.0f} s")
        hosts.deploy(
            {
                "model": "bundled",
                "rpc": {"secret_file": f"{HOME}/.kvrelay-secret"},
                "front": {"api_key_file": f"{HOME}/.kvrelay-api-keys"},
                "prefill": {"label_selector": {"kvrelay-role": "prefill"}},
                "decode": {"label_selector": {"kvrelay-role": "decode"}},
            }
        )
        say(f"every replica was there {time.monotonic() - began:.0f} s after ray up began")
        for host in lan.hosts:
            hosts.run(host, "test", "-f", f"{_SITE}/cluster/app.py")
        say(hosts.run(head, "ray", "list", "nodes"))
        say(hosts.checked_status())
        say(hosts.complete("def main():"))
        _take_down(hosts, before)


def _take_down(hosts: RayHosts, before: Mapping[str, Counter[str]]) -> None:
    """As docs/operations.md says; `before`: which processes each host had before `ray up`."""
    hosts.run(hosts.head, "serve", "shutdown", "--yes")
    hosts.run(hosts.head, "ray", "down", "--yes", _FILE, timeout_s=DOWN_S)
    for host in hosts.others:
        hosts.run(host, "ray", "stop", timeout_s=DOWN_S)
    for host in hosts.lan.hosts:
        _wait_until_clean(host, before[host.name])


def _wait_until_clean(host: Host, before: Counter[str]) -> None:
    def left() -> Counter[str]:
        return _processes(host) - before

    say(f"{host.name}: {left().total()} processes left at first {sorted(left())}")
    took_s = wait_until(lambda: not left(), GONE_S, lambda: f"{host.name}: {left()}")
    say(f"{host.name}: none {took_s:.0f} s later")


def _processes(host: Host) -> Counter[str]:
    lines = host.run("ps", "-eo", "args").splitlines()
    return Counter(line for line in lines if line != "ps -eo args")


def config(hosts: RayHosts) -> dict[str, Any]:
    """The file as it is, but for the addresses, the user, and where the wheel is."""
    said = (ROOT / "deploy/ray-local.yaml").read_text().replace("/home/ubuntu", HOME)
    config: dict[str, Any] = yaml.safe_load(said)
    head, *others = (hosts.lan.address(host) for host in hosts.lan.hosts)
    config["provider"] |= {"head_ip": head, "worker_ips": others}
    config["auth"] = {"ssh_user": "root", "ssh_private_key": _KEY}
    mounts = config["file_mounts"].items()
    config["file_mounts"] = {there: _WHEEL if here == "dist" else here for there, here in mounts}
    return config


def _let_in(hosts: RayHosts) -> None:
    """Every host has the same user, with one key and a role; the file spreads the rest."""
    head = hosts.head
    hosts.run(head, "mkdir", "-p", f"{HOME}/.ssh")
    hosts.run(head, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", _KEY)
    hosts.run(head, "ray", "get-auth-token", "--generate")
    head.write(f"{HOME}/.kvrelay-secret", hosts.environment["KVRELAY_SECRET"])
    head.write(f"{HOME}/.kvrelay-api-keys", hosts.environment["KVRELAY_API_KEYS"])
    public = hosts.run(head, "cat", f"{_KEY}.pub")
    for host in hosts.lan.hosts:
        host.write(f"{HOME}/.ssh/authorized_keys", public)
        host.write(f"{HOME}/.kvrelay-labels", f"kvrelay-role={ROLES[host.name]}\n")
        _serve_ssh(host, hosts.environment)


def _serve_ssh(host: Host, environment: Mapping[str, str]) -> None:
    """With the files of the host, not of the machine that it is on."""
    ours = {name: environment[name] for name in _OF_THE_USER} | _PIP
    exports = "".join(f"export {name}={value}\n" for name, value in ours.items())
    host.write(f"{HOME}/.bashrc", exports)  # Ray reads it before every command
    host.write(
        f"{HOME}/sshd_config",
        f"HostKey {HOME}/host_key\nAuthorizedKeysFile {HOME}/.ssh/authorized_keys\n"
        "PermitRootLogin prohibit-password\nStrictModes no\nPidFile none\nUsePAM no\n",
    )
    host.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{HOME}/host_key")
    host.run("sh", "-c", f"mkdir -p /run/sshd && /usr/sbin/sshd -f {HOME}/sshd_config")


if __name__ == "__main__":
    main()
