"""A cluster on two hosts, one of which is cut off under load: what fails, and for how long.
A table for docs/operations.md; what each link chose, and the ports, come first.

python -m tests.e2e.two_hosts [LAYOUT ...]    as root
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from tests.e2e.hosts import Host, Lan
from tests.e2e.ports import show_ports
from tests.e2e.ray_hosts import PORT, RayHosts, wait_until
from tests.e2e.telling import say
from tests.e2e.traffic import Request
from tests.e2e.watched import reading, report, report_heading, traffic

BEFORE_S, BLINK_S, AFTER_S = 5.0, 1.0, 25.0
DEAD_S, ENDED_S, BACK_S = 180.0, 30.0, 180.0
ENGINE = {"dtype": "float32", "kv_cache_memory_bytes": 48 << 20, "max_num_seqs": 16}


class Layout(NamedTuple):
    """The roles of the head and of the host that is cut off, and how many decode workers."""

    head: str
    other: str
    num_decode: int = 1
    local_prefill: str = "auto"

    @property
    def is_needed(self) -> bool:
        """The other host; a prefill worker may be there for nothing, if prompts are computed sooner
        where they are answered."""
        return self.other != "prefill" or self.local_prefill == "never"

    @property
    def args(self) -> dict[str, Any]:
        args: dict[str, Any] = {"model": "bundled", "engine": ENGINE}
        args["local_prefill"] = self.local_prefill
        for pool in ("prefill", "decode"):
            args[pool] = {"label_selector": {"kvrelay-role": f"in({pool},both)"}}
        args["decode"] |= {"replicas": self.num_decode, "max_replicas_per_node": 1}
        args["ingress"] = {"num_cpus": 0, "label_selector": {"kvrelay-role": self.head}}
        return args


LAYOUTS = {
    "the prefill worker": Layout("decode", "prefill"),
    "the prefill worker, local_prefill never": Layout("decode", "prefill", 1, "never"),
    "the decode worker": Layout("prefill", "decode"),
    "the decode worker, local_prefill never": Layout("prefill", "decode", 1, "never"),
    "one of two decode workers and the prefill worker": Layout("decode", "both", 2),
}


def main() -> None:
    for name in sys.argv[1:] or LAYOUTS:
        layout = LAYOUTS[name]
        with Lan(["head", "other"]) as lan:
            hosts = RayHosts(lan, {"head": layout.head, "other": layout.other})
            hosts.deploy(layout.args)
            say(f"\n## Cut off: {name}\n")
            with _nodes(hosts) as nodes, traffic(hosts, hosts.head) as requests:
                time.sleep(BEFORE_S)
                say(hosts.checked_status())
                say(show_ports(lan.hosts, [lan.address(one) for one in lan.hosts]))
                report_heading("cut off")
                blink(hosts, requests)
                outlast(hosts, nodes, requests, is_needed=layout.is_needed)


def blink(hosts: RayHosts, requests: Sequence[Request]) -> None:
    (other,) = hosts.others
    began = time.time()
    hosts.lan.cut(other)
    time.sleep(BLINK_S)
    hosts.lan.mend(other)
    time.sleep(AFTER_S)
    report(f"{BLINK_S:g} s", began, requests)


def outlast(
    hosts: RayHosts, nodes: Sequence[Nodes], requests: Sequence[Request], *, is_needed: bool
) -> None:
    """Until Ray takes the node for dead; then it is started anew."""
    (other,) = hosts.others
    address = hosts.lan.address(other)
    began = time.time()
    hosts.lan.cut(other)
    wait_until(lambda: address not in nodes[-1].addresses, DEAD_S)
    dead = nodes[-1]
    report("until its node was dead", began, requests)
    hosts.lan.mend(other)
    time.sleep(ENDED_S)
    left = _rays(other)
    before = set(hosts.num_drawn())
    hosts.run(other, "ray", "stop")
    hosts.join(other)
    back_s = wait_until(hosts.is_ready, BACK_S, hosts.status)
    used = "" if not is_needed else f", and used after {back_s + _until_used(hosts, before):.0f} s"
    time.sleep(AFTER_S)
    report("from then on", dead.at, requests)
    say(
        f"\ndead to Ray after {dead.at - began:.0f} s; of its processes there were {left}"
        f" {ENDED_S:g} s after it could reach the head again; all replicas were there"
        f" {back_s:.0f} s after it was started anew{used}; tokens drawn by new ones:"
        f" {_new(hosts, before)}\n\n{hosts.status()}"
    )


def _until_used(hosts: RayHosts, before: Collection[str]) -> float:
    return wait_until(lambda: bool(_new(hosts, before)), BACK_S, hosts.status)


def _new(hosts: RayHosts, before: Collection[str]) -> dict[str, float]:
    """What replicas that were not there before have drawn; those that have not are left out."""
    drawn = hosts.num_drawn()
    return {name: drawn[name] for name in drawn if name not in before and drawn[name]}


class Nodes(NamedTuple):
    """Alive to Ray from this Unix time on."""

    at: float
    addresses: list[str]


def _rays(host: Host) -> list[str]:
    """Ray's processes, and ours on it."""
    lines = host.run("ps", "-eo", "args").splitlines()
    return [line[:80] for line in lines if "raylet" in line or line.startswith("ray::")]


@contextmanager
def _nodes(hosts: RayHosts) -> Iterator[list[Nodes]]:
    address = f"{hosts.lan.address(hosts.head)}:{PORT}"
    nodes: list[Nodes] = []
    with reading(hosts, hosts.head, lambda said: nodes.append(Nodes(*said)), "node_watch", address):
        wait_until(lambda: bool(nodes), 30)
        yield nodes


if __name__ == "__main__":
    main()
