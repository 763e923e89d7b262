"""What it costs to kill Ray's GCS under load, where its state outlives it and something starts the
head anew: a table for docs/operations.md.

python -m tests.e2e.head_lost [redis] [rocksdb]    as root, with redis-server (Debian's)
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Mapping
from subprocess import Popen

from tests.e2e.hosts import HOME, Host, Lan
from tests.e2e.ray_hosts import PORT, RayHosts, wait_until
from tests.e2e.telling import say
from tests.e2e.watched import report, report_heading, traffic

BEFORE_S, AFTER_S, BACK_S = 5.0, 15.0, 120.0
REDIS_PORT = 6380
# As systemd does with Restart=always: `--block` ends when a process of the head has, and what is
# left of it, HAProxy, is ended before it starts anew.
_KEEP = """
while true; do
    "$@" >> /tmp/head.log 2>&1
    kill -9 $(pgrep -x haproxy)
    sleep 1
done
"""
_SMALL = ("--num-cpus=0", "--object-store-memory=100000000")
_SEQUENCES = 16  # of which the first clients take fewer than half, and all clients more
ENGINE = {"dtype": "float32", "kv_cache_memory_bytes": 192 << 20, "max_num_seqs": _SEQUENCES}
ON_WORKER = {"label_selector": {"kvrelay-role": "worker"}}
ARGS = {
    "model": "bundled",
    "engine": ENGINE,
    "prefill": ON_WORKER,
    "decode": {"replicas": "1-2", **ON_WORKER},
    "ingress": {"num_cpus": 0, **ON_WORKER},
    "scaling": {"max_sequence_use": 0.5, "inter_token_s": 10, "ttft_s": 60, "down_delay_s": 600},
}


def main() -> None:
    for storage in sys.argv[1:] or ("redis", "rocksdb"):
        with Lan(["head", "worker", "store"]) as lan:
            hosts = RayHosts(lan, {"head": "head", "worker": "worker"}, start=False)
            _start(hosts, storage)
            say(f"\n## {storage}\n\n{hosts.status()}")
            report_heading("killed")
            _kill_and_watch(hosts)
            _grow(hosts)
            say(hosts.status())
            say(hosts.run(hosts.head, "ps", "-eo", "pid,ppid,args"))


def _start(hosts: RayHosts, storage: str) -> None:
    _, worker, store = hosts.lan.hosts
    words: tuple[str, ...] = ()
    if storage == "redis":
        kept, words = _start_redis(store, hosts.lan.address(store))
    else:
        kept = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": f"{HOME}/gcs"}
    hosts.environment |= kept
    _keep_head(hosts, words)
    hosts.join(worker)
    hosts.deploy(ARGS, front_host="0.0.0.0")


def _kill_and_watch(hosts: RayHosts) -> None:
    head, worker, _ = hosts.lan.hosts
    before = hosts.num_drawn().keys()
    with traffic(hosts, worker) as requests:
        time.sleep(BEFORE_S)
        began = time.time()
        head.run("sh", "-c", "kill -9 $(pgrep -x gcs_server)")
        said = _come_back(hosts)
        time.sleep(AFTER_S)
        report("Ray's GCS", began, requests)
    kept = before & hosts.num_drawn().keys()
    say(f"\n{said}; kept of {len(before)} workers: {', '.join(sorted(kept)) or 'none'}\n")


def _grow(hosts: RayHosts) -> None:
    """Twice the clients ask for a second decode worker."""
    worker = hosts.lan.hosts[1]
    before = hosts.num_drawn()

    def is_used() -> bool:
        drawing = [name for name, drawn in hosts.num_drawn().items() if drawn > before.get(name, 0)]
        return sum(name.startswith("decode") for name in drawing) > 1

    with traffic(hosts, worker), traffic(hosts, worker):
        grown_s = wait_until(is_used, BACK_S, hosts.status)
    say(f"a second decode worker was used {grown_s:.0f} s after more was asked for")


def _start_redis(host: Host, address: str) -> tuple[Mapping[str, str], tuple[str, ...]]:
    password = secrets.token_hex(16)
    listen = ("--bind", address, "--port", str(REDIS_PORT), "--requirepass", password)
    host.start("redis-server", *listen, "--save", "", "--appendonly", "no", "--dir", "/tmp")
    return {"RAY_REDIS_ADDRESS": f"{address}:{REDIS_PORT}"}, ("--redis-password", password)


def _keep_head(hosts: RayHosts, words: tuple[str, ...]) -> Popen[str]:
    hosts.run(hosts.head, "ray", "get-auth-token", "--generate")
    token = hosts.run(hosts.head, "cat", f"{HOME}/.ray/auth_token")
    for host in hosts.others:
        host.write(f"{HOME}/.ray/auth_token", token)
    label = "--labels=kvrelay-role=head"
    start = ("ray", "start", "--head", f"--port={PORT}", "--block", label, *_SMALL, *words)
    process = hosts.start(hosts.head, "sh", "-c", _KEEP, "-", *start)
    wait_until(lambda: _is_healthy(hosts), BACK_S, lambda: _log(hosts))
    return process


def _come_back(hosts: RayHosts) -> str:
    """From the kill on."""
    started_s = wait_until(lambda: _num_starts(hosts) == 2, BACK_S, lambda: _log(hosts))
    ready_s = started_s + wait_until(lambda: _is_ready(hosts), BACK_S, lambda: _log(hosts))
    return (
        f"the head had started anew after {started_s:.0f} s, Serve's controller answered after"
        f" {ready_s:.0f} s"
    )


def _num_starts(hosts: RayHosts) -> int:
    said = hosts.run(hosts.head, "cat", "/tmp/head.log")
    return said.count("Ray runtime started.")


def _is_healthy(hosts: RayHosts) -> bool:
    address = f"{hosts.lan.address(hosts.head)}:{PORT}"
    try:
        hosts.run(hosts.head, "ray", "health-check", "--address", address)
    except RuntimeError:
        return False
    return True


def _is_ready(hosts: RayHosts) -> bool:
    try:
        return hosts.is_ready()
    except RuntimeError:
        return False


def _log(hosts: RayHosts) -> str:
    return hosts.run(hosts.head, "tail", "-n", "40", "/tmp/head.log")


if __name__ == "__main__":
    main()
