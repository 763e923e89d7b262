"""A prefill and a decode worker behind HTTP: ours, and vLLM's."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import cores
from benchmarks.servers import Server, free_port, kvrelay
from benchmarks.sides import KV_BYTES, Vllm, vllm
from benchmarks.workloads import MAX_LEN


@dataclass(frozen=True)
class Workers:
    """Addresses of ours, and of the decode worker's page of metrics."""

    prefill: str
    decode: str
    metrics: str


@contextmanager
def our_workers(
    model: Path, logs: Path, further: Mapping[str, Sequence[str]] | None = None
) -> Iterator[Workers]:
    """As a user starts them, with all of their caches touched; `further` are more flags by
    role."""
    common = ["--dtype", "bfloat16", "--kv-cache-memory-bytes", str(KV_BYTES)]
    servers = {}
    for role in ("prefill", "decode"):
        flags = [*common, *(further or {}).get(role, ())]
        command = kvrelay("worker", str(model), "--role", role, *flags)
        servers[role] = Server(command, {}, logs / f"{role}.log")
    try:
        lines = {role: s.wait_for_line("worker at ") for role, s in servers.items()}
        addresses = {role: line.split()[-1] for role, line in lines.items()}
        metrics = servers["decode"].wait_for_line("metrics at ").split()[-1]
        for server in servers.values():
            server.wait_for_line(" of cache touched in ")
        yield Workers(addresses["prefill"], addresses["decode"], metrics)
    finally:
        for server in servers.values():
            server.close()


@contextmanager
def our_front(model: Path, logs: Path, workers: Workers, local_prefill: str) -> Iterator[str]:
    """The URL of an HTTP front over the pair."""
    port = free_port()
    route = ["--session", workers.decode, "--prefill", workers.prefill]
    words = [*route, "--local-prefill", local_prefill, "--port", str(port)]
    with Server(kvrelay("local", str(model), *words), {}, logs / "front.log") as server:
        server.wait_for_port(port)
        yield f"http://127.0.0.1:{port}"


@contextmanager
def vllm_pair(
    peer: Vllm, model: Path, logs: Path, further: Mapping[str, str] | None = None
) -> Iterator[str]:
    """vLLM's own connector over NIXL, one core each as its documentation binds them, and the
    two-phase proxy in front. Its NIXL progress threads spin on the same cores. `further` is of
    the environment of all three."""
    transfer = json.dumps(
        {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    )
    ports = {"prefill": free_port(), "decode": free_port(), "proxy": free_port()}
    servers = []
    further = further or {}
    try:
        for role, core in zip(("prefill", "decode"), cores(), strict=False):
            side = vllm(peer, [core])
            environment = {**side.environment, **further}
            environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
            command = [
                str(peer.python),
                "-m",
                "vllm.entrypoints.cli.main",
                "serve",
                str(model),
                "--port",
                str(ports[role]),
                "--max-model-len",
                str(MAX_LEN),
                "--dtype",
                peer.dtype,
                "--kv-cache-memory-bytes",
                str(KV_BYTES),
                "--kv-transfer-config",
                transfer,
            ]
            servers.append(Server(command, environment, logs / f"vllm-{role}.log"))
        for server, role in zip(servers, ("prefill", "decode"), strict=True):
            server.wait_for_port(ports[role])
        urls = [f"http://127.0.0.1:{ports[role]}" for role in ("prefill", "decode")]
        words = ["-m", "benchmarks.peers.vllm_proxy", str(ports["proxy"]), *urls]
        servers.append(Server([str(peer.python), *words], further, logs / "vllm-proxy.log"))
        servers[-1].wait_for_port(ports["proxy"])
        yield f"http://127.0.0.1:{ports['proxy']}"
    finally:
        for server in reversed(servers):
            server.close()
