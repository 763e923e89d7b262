"""The node types of deploy/ray-cluster.yaml as nodes of a real cluster, all on this machine, which
`kvrelay serve` joins: it must have a key, each pool is only where its label or its resource is, as
often as it may and with the GPUs that it asks for, and it takes away nothing but what it has
brought."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import pytest
import ray
import yaml
from ray import serve
from ray.cluster_utils import Cluster as Nodes

from cluster.commands.serve_stop import END_S
from cluster.ray_cluster import PROXY_SETTINGS
from cluster.ray_cluster import nodes as nodes_alive
from cluster.serve_details import APP_NAME, SERVICER, serve_details
from tests.e2e.cluster import answers_at, http, kill, num_aborted, page_at, wait_until
from tests.e2e.listening import listeners
from tests.e2e.tokens import TokenClient
from tests.forked import Origin, run_forked
from tests.ports import free_port

SERVE = [sys.executable, "-m", "cluster.cli", "serve"]
COMMAND = Origin(("cluster.commands.serve", "cluster.deployment", "cluster.ray_cluster"))
FILE = Path(__file__).parents[2] / "deploy/ray-cluster.yaml"
DECODE_NODES, DECODE_REPLICAS = 1, 2
NUM_GPUS = 2  # of each node
UP_S, HEARD_S, BACK_S = 120.0, 10.0, 60.0
NOTICED_S = 10.0  # that one of Ray's actors has died, by those it called


class Placed(NamedTuple):
    nodes: Nodes
    described: dict[str, Any]  # the file's node types

    def add(self, kind: str) -> None:
        """With GPUs, to Ray's mind."""
        node = {name: self.described[kind][name] for name in ("labels", "resources")}
        self.nodes.add_node(num_cpus=4, num_gpus=NUM_GPUS, **node)
        self.nodes.wait_for_nodes()


@pytest.fixture(scope="module")
def placed() -> Iterator[Placed]:
    described = yaml.safe_load(FILE.read_text())["available_node_types"]
    with pytest.MonkeyPatch.context() as environment:
        for name in ("RAY_ADDRESS", "RAY_AUTH_MODE"):
            environment.delenv(name, raising=False)
        environment.setenv("RAY_SERVE_LOG_TO_STDERR", "0")
        for name, value in PROXY_SETTINGS.items():
            environment.setenv(name, value)
        environment.setenv("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "1")  # as in deploy/serve.yaml
        # A front that takes 15 s to begin would be killed, and `serve.start` fail with it.
        environment.setenv("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "20")
        nodes = Nodes(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        try:
            placed = Placed(nodes, described)
            for kind in ("prefill", *["decode"] * DECODE_NODES):
                placed.add(kind)
            environment.setenv("RAY_ADDRESS", nodes.address)
            yield placed
        finally:
            nodes.shutdown()  # type: ignore[no-untyped-call]


def refused(*words: str) -> str:
    """What `kvrelay serve` says to it."""
    command = ("cluster.cli", "serve", "--colocated", *words)
    address = {"RAY_ADDRESS": os.environ["RAY_ADDRESS"]}
    done = run_forked(*command, environment=address, origin=COMMAND)
    assert done.returncode == 2, done.stderr
    return done.stderr.splitlines()[-1]


def test_a_second_node_asks_for_a_key(placed: Placed) -> None:
    said = refused("--port", "0")
    assert f"--api-key-file: none, and the cluster has {DECODE_NODES + 2} nodes" in said


class Ports(NamedTuple):
    http: int
    grpc: int


@pytest.fixture
def ports(placed: Placed) -> Iterator[Ports]:
    """Of a Serve that runs before ours comes, with this process in the cluster. Its front is its
    Python proxy, since nobody has asked for HAProxy: one, as all nodes would share its ports."""
    ray.init(address=placed.nodes.address, log_to_driver=False)
    try:
        ports = Ports(free_port(), free_port())
        grpc_options = {"port": ports.grpc, "grpc_servicer_functions": [SERVICER]}
        serve.start("HeadOnly", http_options={"port": ports.http}, grpc_options=grpc_options)
        yield ports
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()


class Served:
    """`kvrelay serve` on a Ray cluster of others'."""

    def __init__(self, folder: Path) -> None:
        args = {
            "engine": {"dtype": "float32", "kv_cache_memory_bytes": 16 << 20, "max_num_seqs": 2},
            "prefill": {"resources": {"prefill_slot": 1}},
            "decode": {
                "label_selector": {"kvrelay-role": "decode"},
                "num_gpus": 1,
                "replicas": DECODE_REPLICAS,
                "max_replicas_per_node": 1,
            },
            "worker_host": "127.0.0.1",
            "front": {"allow_unauthenticated": True},
        }
        (folder / "args.yaml").write_text(yaml.safe_dump(args))
        self._log = folder / "log"
        with self._log.open("wb") as file:
            words = ["--config", str(folder / "args.yaml")]
            self.process = subprocess.Popen(
                [*SERVE, *words], stdout=file, stderr=file, start_new_session=True
            )

    def said(self) -> str:
        return self._log.read_text()


@pytest.fixture
def served(ports: Ports, tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    try:
        yield served
    finally:
        served.process.kill()
        served.process.wait()


def applications() -> dict[str, Any]:
    details = serve_details()
    assert details is not None
    found: dict[str, Any] = details["applications"]
    return found


def running() -> list[tuple[str, str]]:
    """The pool and the node of every replica that runs."""
    return [
        (name, replica["node_id"])
        for name, deployment in applications().get(APP_NAME, {}).get("deployments", {}).items()
        for replica in deployment["replicas"]
        if replica["state"] == "RUNNING"
    ]


def num_per_node(pool: str, found: Sequence[tuple[str, str]]) -> list[int]:
    return list(Counter(node for name, node in found if name == pool).values())


@pytest.mark.timeout(5 * UP_S)  # beyond its own waits, which say what did not come
def test_each_pool_runs_on_its_own_nodes_until_it_is_stopped(
    placed: Placed, ports: Ports, served: Served
) -> None:
    def is_all_there() -> bool:
        return Counter(pool for pool, _ in running()) >= Counter(
            {"prefill": 1, "decode": DECODE_NODES, "ingress": 1}
        )

    wait_until(is_all_there, UP_S, lambda: f"{running()}\n{served.said()}")
    unplaced = "1 not placed: no node with kvrelay-role=decode may take one more"
    wait_until(lambda: unplaced in served.said(), UP_S, served.said)
    for pool in ("prefill", "decode"):  # although another process has started Serve
        ready = re.compile(rf"^\({pool} pid=\d+, ip=\S+\) .* ready after", re.MULTILINE)
        wait_until(lambda ready=ready: ready.search(served.said()) is not None, HEARD_S)  # type: ignore[misc]
    found = running()
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    kinds = {node["NodeID"]: node["Labels"].get("kvrelay-role") for node in nodes}
    for pool in ("prefill", "decode"):
        assert {kinds[node] for name, node in found if name == pool} == {pool}
    # There is room for another on its node, but not by its limit.
    assert num_per_node("decode", found) == [1] * DECODE_NODES
    free = {kinds[name]: node.free for name, node in nodes_alive().items()}
    assert free["decode"]["GPU"] == 1
    assert free["prefill"]["GPU"] == NUM_GPUS
    (slots,) = placed.described["prefill"]["resources"].values()
    assert free["prefill"]["prefill_slot"] == slots - 1

    # Others are refused, and change nothing.
    with ThreadPoolExecutor() as threads:
        any_port, another = threads.map(
            lambda number: refused("--allow-unauthenticated", "--port", number), ("0", "9")
        )
    assert f"RAY_ADDRESS: the application {APP_NAME} is on that Ray cluster already" in any_port
    assert f"port: 9, but Serve runs on that Ray cluster already, with {ports.http}" in another
    assert running() == found

    placed.add("decode")
    address = f"bundled is served at http://127.0.0.1:{ports.http}/v1\n"
    wait_until(lambda: address in served.said(), UP_S, served.said)
    words = served.said().partition(address)[2].split()
    host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    pools = f"prefill 1 replica on {host} decode 2 replicas on {host} ingress 1 replica on {host}"
    assert " ".join(words).startswith(f"pools: {pools} prompts are handed over by nixl")
    assert num_per_node("decode", running()) == [1] * DECODE_REPLICAS
    check_what_the_python_proxy_answers(ports)
    check_that_the_python_proxy_comes_back(ports)
    os.killpg(served.process.pid, signal.SIGINT)
    was_cut = served.process.wait(END_S + 5)
    assert was_cut == ("stopped at once" in served.said())
    wait_until(lambda: APP_NAME not in applications(), UP_S, served.said)


def check_that_the_python_proxy_comes_back(ports: Ports) -> None:
    """When it is killed. With it goes what goes through it, of which nobody keeps anything."""
    url = f"http://127.0.0.1:{ports.http}"
    pids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    front = [pid for pid in pids if any(one.port == ports.http for one in listeners([pid]))]
    body = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with http.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        assert len(front) == 1
        kill(front)
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
            list(lines)
    wait_until(lambda: answers_at(url), BACK_S)
    wait_until(lambda: num_aborted(page_at(url)) == 1, NOTICED_S)


def check_what_the_python_proxy_answers(ports: Ports) -> None:
    """The front where HAProxy is not. Its gRPC has every interface, as Serve knows no other."""
    every = listeners(int(entry.name) for entry in Path("/proc").glob("[0-9]*"))
    fronts = [one for one in every if one.port in ports]
    assert all(one.process.startswith("ray::ProxyActor") for one in fronts), fronts
    assert {one.port for one in fronts if one.is_loopback} == {ports.http}
    url = f"http://127.0.0.1:{ports.http}"
    body = {"prompt": "x", "max_tokens": 5, "ignore_eos": True, "stream": True}
    usage = {"stream_options": {"include_usage": True}}
    answer = http.post(f"{url}/v1/completions", json={**body, **usage}, timeout=60)
    assert answer.status_code == 200, answer.text
    *_, last, end, rest = answer.text.split("\n\n")
    assert json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"] == 5
    assert (end, rest) == ("data: [DONE]", "")
    for value in (b"0.01", b"\xff"):
        of_serve = {b"X-Request-Timeout-Seconds": value, b"X-Session-Id": value}
        answer = http.post(f"{url}/v1/completions", json=body, headers=of_serve, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.text.endswith("data: [DONE]\n\n")
    for wrong, status in (({"max_tokens": 0}, 400), ({"model": "another"}, 404)):
        said = http.post(f"{url}/v1/completions", json={**body, **wrong})
        assert said.status_code == status
        assert said.json()["error"]["param"] == next(iter(wrong))
    client = TokenClient(f"127.0.0.1:{ports.grpc}", url)
    assert len(client.tokens(client.request("x", 5))) == 5
    with pytest.raises(grpc.RpcError, match="max_tokens") as invalid:
        client.tokens(client.request("x", 10**6))
    assert invalid.value.code() is grpc.StatusCode.INVALID_ARGUMENT
