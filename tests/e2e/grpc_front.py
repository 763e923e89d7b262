"""The gRPC front of deploy/serve.yaml for real: deployed with `serve deploy`, called on its own
host, from another one, and at the port that Serve opens for the ingress replica.

python -m tests.e2e.grpc_front [keys] [keyless]    as root
"""

from __future__ import annotations

import sys

from tests.e2e.hosts import Host, Lan
from tests.e2e.ports import ports, show_ports
from tests.e2e.ray_hosts import RayHosts
from tests.e2e.telling import say

FRONT_PORT, REPLICA_PORT = 9000, 40000  # the first of a range
ENGINE = {"dtype": "float32", "kv_cache_memory_bytes": 48 << 20, "max_num_seqs": 16}
ARGS = {"model": "bundled", "engine": ENGINE, "prefill": {"replicas": 0}, "max_body_bytes": 100_000}


def main() -> None:
    for keys in sys.argv[1:] or ("keys", "keyless"):
        with_keys = keys == "keys"
        with Lan(["head", "stranger"]) as lan:
            hosts = RayHosts(lan, {"head": "head"}, start=False)
            if not with_keys:
                del hosts.environment["KVRELAY_API_KEYS"]
            hosts.start_head()
            front = {"requests_per_minute": 60} if with_keys else {}
            hosts.deploy({**ARGS, "front": front}, grpc=True)
            say(f"\n# {'With' if with_keys else 'Without'} API keys\n")
            if with_keys:
                say(show_ports(lan.hosts[:1], [lan.address(hosts.head)], lan.hosts[1]))
            _show_calls(hosts)


def _show_calls(hosts: RayHosts) -> None:
    head, stranger = hosts.lan.hosts
    own = hosts.lan.address(head)
    replica = min(port.number for port in ports(head) if port.number >= REPLICA_PORT)
    for host, *words in (
        (stranger, f"{own}:{FRONT_PORT}"),
        (stranger, f"{own}:{replica}"),
        (head, f"127.0.0.1:{FRONT_PORT}", "rate"),
    ):
        say(f"\n{host.name} calls {words[0]}\n\n{_calls(hosts, host, *words)}")


def _calls(hosts: RayHosts, host: Host, *words: str) -> str:
    return hosts.run(host, "python", "-m", "tests.e2e.grpc_calls", *words, timeout_s=300)


if __name__ == "__main__":
    main()
