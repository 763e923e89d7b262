"""A whole cluster on this machine: Ray, its front, an ingress, both pools, and what kills them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
import uuid
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import openai
import pytest

from protos.ingress_pb2 import ListModels
from protos.limits import PROTOCOL
from protos.worker_pb2 import DescribeRequest
from protos.worker_pb2_grpc import WorkerStub
from tests.e2e.asking import (
    MANY_TOKENS,
    MORE_TOKENS,
    NUM_ASKERS,
    NUM_TOKENS,
    NUM_UNREAD,
    PROMPTS,
    Load,
    all_at_once,
    asking_to_read,
    body,
    hardly_any_asked_again,
    idle_meanwhile,
    keep_asking,
    keep_asking_otherwise,
    short_answer,
    streamed,
)
from tests.e2e.cluster import (
    CONTROLLER,
    Cluster,
    answers_at,
    busiest_decode,
    by_replica,
    http,
    is_idle,
    kill,
    num_aborted,
    page_of,
    pids_by_replica,
    total,
    wait_until,
    whole_page,
)
from tests.e2e.listening import (
    HAPROXY,
    OPEN_PORTS,
    PROXY_ACTOR,
    TOKEN,
    listeners,
    told_a_stranger,
)
from tests.e2e.neighbour import neighbour, why_none
from tests.e2e.other_model import write_other_model
from tests.e2e.tokens import TokenClient

# A thread for each worker: they share no core, and prompts are handed off.
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_memory_bytes": 48 << 20,
    "max_num_seqs": 16,
    "num_threads": 1,
}
ARGS = {
    "model": "bundled",
    "served_model_name": ["mine"],
    "decode": {"replicas": 2},
    "worker_host": "127.0.0.1",
}
SMALL = ["--dtype", "float32", "--kv-cache-memory-bytes", "48MiB", "--max-num-seqs", "16"]
SMALL += ["--num-threads", "1"]
BACK_S = 60.0
AT_WORK_S = 30.0
NUM_READERS, NUM_WAITING = 3, 16  # when all ends: two prompts are all that a worker takes at once
GONE_S = 1.0  # what a client has left
NOTICED_S = 10.0  # that one of Ray's actors has died, by those it called
ENDED_S = 15.0  # after Ctrl-C, with all that it has started, whatever is asked for


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    log = tmp_path_factory.mktemp("cluster") / "log"
    pools = ["--decode-replicas", "2", "--ingress-replicas", "2", "--grpc-port", "0"]
    full = {"RAY_memory_usage_threshold": "0.01"}
    cluster = Cluster(log, "--served-model-name", "mine", *pools, *SMALL, **full)
    yield cluster
    cluster.kill()


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> list[tuple[str, int]]:
    """What an undisturbed cluster answers. Some of the prompts are asked again by themselves."""
    return all_at_once(cluster, PROMPTS)


def test_the_pools_are_told_when_they_run(cluster: Cluster) -> None:
    words = " ".join(cluster.said().partition("is served at ")[2].split())
    found = re.search(r"model: bundled pools: (.*) try: ", words)
    assert found is not None, words
    assert re.sub(r" on \S+", "", found[1]) == (
        "prefill 1 replica decode 2 replicas ingress 2 replicas"
        " prompts are handed over by nixl where it can, else by socket"
    )


def test_none_is_killed_for_what_is_taken_of_the_machine_s_memory(cluster: Cluster) -> None:
    """Of a hundredth, where Ray would wait for 95 % and then kill all of them, again and again."""
    assert cluster.is_ready()
    assert "memory pressure" not in cluster.said()


def test_every_worker_says_what_it_has(cluster: Cluster) -> None:
    wait_until(lambda: cluster.said().count("the cache holds") >= 3, 30, cluster.said)


def test_ready_is_said_when_a_prompt_was_handed_over(cluster: Cluster) -> None:
    """Once for each ingress, though nobody runs whom the prompt would hold up."""
    for _ in range(4):  # asked of either
        wait_until(lambda: len(usable_workers(cluster)) == 3, 30, cluster.said)
    before = total(whole_page(cluster), "handoffs_total")
    assert all(cluster.is_ready() for _ in range(6))
    handed_over = total(whole_page(cluster), "handoffs_total") - before
    assert 1 <= handed_over <= 2


def usable_workers(cluster: Cluster) -> list[str]:
    """Those of either pool that the ingress which is asked would give a request to."""
    view = http.get(f"{cluster.url}/debug/routing", timeout=10).json()
    return [one["address"] for one in view["workers"] if one["takes_new"]]


def test_what_is_open_beyond_loopback_is_what_is_documented(cluster: Cluster) -> None:
    """And the front, the ingresses behind it and the workers are not: 127.0.0.2 is this machine,
    as any address of it would be, but nothing that is bound to 127.0.0.1."""
    every = listeners([cluster.process.pid, *cluster.pids()])
    ports: dict[tuple[str, str], set[int]] = {}
    for one in [one for one in every if not one.is_loopback]:
        (kind,) = (kind for kind in OPEN_PORTS if kind in one.process)
        said = told_a_stranger(one)
        assert said in OPEN_PORTS[kind], one
        ports.setdefault((kind, said), set()).add(one.port)
    assert len(ports[HAPROXY, "200"]) == 2
    of_grpc = ports["ray::ServeReplica:kvrelay:ingress", "no such call"]
    assert len(of_grpc) == 2
    assert all(10000 <= port < 20000 for port in of_grpc), (
        "Serve's own are any other cluster's, too"
    )
    assert len(ports["gcs/gcs_server", TOKEN]) == 1
    inner = {one.port for one in every if one.is_loopback}
    for port in inner:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), 5).close()
    ours = [urlsplit(cluster.url).netloc, cluster.grpc_address, *usable_workers(cluster)]
    for page in http.get(f"{cluster.url}/metrics/targets", timeout=10).json():
        ours += page["targets"]
    assert {int(address.rpartition(":")[2]) for address in ours} < inner


def test_another_host_is_refused_wherever_this_one_alone_may_ask(cluster: Cluster) -> None:
    """Whoever has a cable to this machine, at every address of it."""
    if why := why_none():
        pytest.skip(why)
    every = listeners([cluster.process.pid, *cluster.pids()])
    documented = {one.port for one in every if not one.is_loopback}
    front = {int(one.rpartition(":")[2]) for one in (cluster.url, cluster.grpc_address)}
    with neighbour() as other, socket.create_server(("0.0.0.0", 0)) as for_all:
        open_port = for_all.getsockname()[1]
        reached = other.reached({open_port, *(one.port for one in every), *front})
        # A port of ours on loopback may be another program's at this machine's other addresses.
        programs = [entry.name for entry in Path("/proc").glob("[0-9]*")]
        others = set(listeners(map(int, programs))) - {*every}
    assert open_port in reached
    assert not reached & front
    assert reached <= {*documented, *(one.port for one in others if not one.is_loopback)}


def test_workers_answer_nobody_without_the_secret_that_the_command_has_made(
    cluster: Cluster,
) -> None:
    """Other users of this machine reach their ports, too."""
    every = usable_workers(cluster)
    assert len(every) == 3
    for address in every:
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as refused:
            WorkerStub(channel).Describe(DescribeRequest(protocol=PROTOCOL), timeout=10)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_every_replica_is_in_the_table_of_what_runs(cluster: Cluster) -> None:
    running = {
        (pool["name"], one["id"], one["state"].lower())
        for pool in cluster.status()["pools"]
        for one in pool["replicas"]
    }
    assert len(running) == 5
    head, columns, *rows = [line.split() for line in cluster.status_table().splitlines() if line]
    assert head[:2] == [f"{cluster.url}/v1", "running"]
    assert columns[:4] == ["pool", "replica", "state", "at"]
    assert {tuple(row[:3]) for row in rows[: len(running)]} == running


def test_the_official_client_is_served(cluster: Cluster) -> None:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["mine"]
        answer = client.completions.create(model="mine", prompt=PROMPTS[0], max_tokens=9)
        assert answer.usage is not None
        assert answer.usage.completion_tokens <= 9
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="another", prompt="x")
    assert cluster.is_ready()


def test_curl_is_answered_as_it_was_announced(cluster: Cluster) -> None:
    (line,) = [one for one in cluster.said().splitlines() if one.startswith("  try:   curl ")]

    def curl(words: str) -> str:
        done = subprocess.run(["sh", "-c", f"curl -sS -f -m 60 {words}"], capture_output=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.decode()

    # Without a limit the model may go on for as long as its context is.
    announced = line.removeprefix("  try:   curl ").replace("{", '{"max_tokens": 20, ', 1)
    assert json.loads(curl(announced))["choices"][0]["message"]["content"]
    said = json.dumps(body(PROMPTS[0], max_tokens=5, stream=True))
    events = curl(f"-N {cluster.url}/v1/completions -d '{said}'").split("\n\n")
    assert len(events) > 2
    assert events[-2:] == ["data: [DONE]", ""]


def test_the_front_waits_a_minute_for_a_client(cluster: Cluster) -> None:
    """What becomes of those that take longer is in test_front.py."""
    (settings,) = cluster.front_folder.glob("*/haproxy.cfg")
    assert "\n    timeout client 60s\n" in settings.read_text()


def test_an_ingress_loads_no_torch(cluster: Cluster) -> None:
    def mapped(pid: int) -> str:
        return Path(f"/proc/{pid}/maps").read_text()

    assert all("libtorch" in mapped(pid) for pid in cluster.replicas("decode"))
    assert len(cluster.replicas("ingress")) == 2
    assert not any("libtorch" in mapped(pid) for pid in cluster.replicas("ingress"))


def test_tokens_come_by_grpc_as_text_does_by_http(
    cluster: Cluster, expected: list[tuple[str, int]]
) -> None:
    client = TokenClient(cluster.grpc_address, cluster.url)
    request = client.request(PROMPTS[0], NUM_TOKENS)
    tokens = client.tokens(request)
    assert (client.text(tokens), len(tokens)) == expected[0]
    assert list(client.stub.GenerateWhole(request).deltas[0].token_ids) == tokens
    assert [model.name for model in client.stub.Models(ListModels()).models] == ["mine"]
    with pytest.raises(grpc.RpcError, match="max_tokens") as refused:
        client.tokens(client.request(PROMPTS[0], 10**6))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_who_hangs_up_on_grpc_leaves_nothing_running(cluster: Cluster) -> None:
    client = TokenClient(cluster.grpc_address, cluster.url)
    request = client.request(PROMPTS[0], MANY_TOKENS)
    request.params.n = ENGINE["max_num_seqs"]  # they take longer than their call may
    for timeout_s in (None, 2.0):
        num_left = num_aborted(whole_page(cluster))
        call = client.stub.Generate(request, timeout=timeout_s)
        if timeout_s is None:
            next(call)
            call.cancel()
        with pytest.raises(grpc.RpcError):
            list(call)
        wait_until(lambda: is_idle(page_of(cluster)), GONE_S)
        assert num_aborted(whole_page(cluster)) == num_left + request.params.n


@pytest.mark.parametrize("stream", [True, False])
def test_who_hangs_up_is_gone_from_every_worker_within_a_second(
    cluster: Cluster, stream: bool
) -> None:
    """From the close of the client's socket until a page of metrics says that no worker runs,
    fetches or holds anything. The last page that counts is asked for within that time. Most
    clients' bodies come after their headers."""
    url = urlsplit(cluster.url)
    data = json.dumps(body(PROMPTS[0], max_tokens=MANY_TOKENS, n=4, stream=stream)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    for _ in range(3):
        wait_until(lambda: is_idle(page_of(cluster)), 10)
        with socket.create_connection((url.hostname or "", url.port or 0)) as connection:
            connection.sendall(head.encode())
            connection.sendall(data)
            wait_until(lambda: total(page_of(cluster), "num_requests_running") == 4, 30)
        wait_until(lambda: is_idle(page_of(cluster)), GONE_S, lambda: page_of(cluster))


def test_a_decode_worker_that_is_killed_costs_no_request_and_is_used_again(
    cluster: Cluster, expected: list[tuple[str, int]]
) -> None:
    before = by_replica(whole_page(cluster), "drawn_tokens_total", "decode").keys()
    assert len(before) == 2
    known = usable_workers(cluster)
    load = Load(cluster)
    kill(cluster.replicas("decode")[:1])
    assert load.results() == expected
    assert cluster.status()["answers"]  # however Serve calls it until the other one is back
    wait_until(lambda: bool(set(usable_workers(cluster)) - set(known)), BACK_S)
    wait_until(lambda: another_decodes(cluster, before), BACK_S, lambda: routing(cluster))


def test_a_decode_worker_that_hangs_costs_no_request_and_is_replaced(
    cluster: Cluster, expected: list[tuple[str, int]]
) -> None:
    """It is stopped for good, and so says nothing, neither to Serve nor to Ray, which are to kill
    it: told to end, it would never do so."""
    wait_until(lambda: len(usable_workers(cluster)) == 3, BACK_S, cluster.said)
    before = by_replica(whole_page(cluster), "drawn_tokens_total", "decode").keys()
    num_moved = total(whole_page(cluster), "reroutes_total")
    pids = pids_by_replica(cluster, "decode")
    load = Load(cluster, MORE_TOKENS)
    hung = pids[busiest_decode(cluster)]
    os.kill(hung, signal.SIGSTOP)
    assert all(map(is_more_of, load.results(), expected))
    assert total(page_of(cluster), "reroutes_total") > num_moved
    wait_until(lambda: hung not in cluster.replicas("decode"), BACK_S, cluster.controller_log)
    wait_until(lambda: len(usable_workers(cluster)) == 3, BACK_S, cluster.said)
    wait_until(lambda: another_decodes(cluster, before), BACK_S, lambda: routing(cluster))


def is_more_of(answer: tuple[str, int], beginning: tuple[str, int]) -> bool:
    """Of one with MORE_TOKENS."""
    return answer[1] == MORE_TOKENS and answer[0].startswith(beginning[0])


def routing(cluster: Cluster) -> str:
    """As one of the ingresses sees it."""
    return http.get(f"{cluster.url}/debug/routing", timeout=10).text


def another_decodes(cluster: Cluster, before: Collection[str]) -> bool:
    """Of requests that no worker has seen, more at once than one may run: a few may all be sooner
    done by the one that has shown how fast it is."""
    prompts = [str(uuid.uuid4()) for _ in range(3 * ENGINE["max_num_seqs"] // 2)]
    with ThreadPoolExecutor(len(prompts)) as threads:
        list(threads.map(lambda prompt: streamed(cluster.url, prompt, max_tokens=48), prompts))
    counts = by_replica(page_of(cluster), "drawn_tokens_total", "decode")
    return any(count for replica, count in counts.items() if replica not in before)


def test_serve_s_controller_may_die(cluster: Cluster, expected: list[tuple[str, int]]) -> None:
    """The one that follows it keeps every replica that had begun."""
    wait_until(lambda: len(workers(cluster)) == 3, BACK_S, cluster.said)
    before = [cluster.replicas(pool) for pool in ("prefill", "decode", "ingress")]
    load = Load(cluster)
    kill(cluster.pids(CONTROLLER))
    assert load.results() == expected
    assert streamed(cluster.url, PROMPTS[0]) == expected[0]
    wait_until(lambda: "Finished recovering" in cluster.controller_log(), BACK_S, cluster.said)
    assert "Stopping Replica" not in cluster.controller_log()
    assert [cluster.replicas(pool) for pool in ("prefill", "decode", "ingress")] == before


def test_serve_s_proxy_actor_takes_its_own_stream_alone_and_comes_back(
    cluster: Cluster, expected: list[tuple[str, int]]
) -> None:
    """HAProxy passes to it what comes while no ingress is known: here it is asked by its own
    address, at which it is to be found again."""
    (proxy,) = cluster.pids(PROXY_ACTOR)
    (place,) = [one for one in listeners([proxy]) if one.is_loopback]
    url, begun = f"http://127.0.0.1:{place.port}", threading.Event()
    num_left = num_aborted(whole_page(cluster))
    with (
        hardly_any_asked_again(),
        ThreadPoolExecutor(1) as threads,
        keep_asking(cluster) as answers,
    ):
        load = Load(cluster)
        carried = threads.submit(streamed, url, PROMPTS[0], begun, max_tokens=MANY_TOKENS)
        assert begun.wait(60)
        kill([proxy])
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
            carried.result(NOTICED_S)
        wait_until(lambda: num_aborted(page_of(cluster)) == num_left + 1, NOTICED_S)
        assert load.results() == expected
        wait_until(lambda: answers_at(url), BACK_S, cluster.controller_log)
    assert answers
    assert all(answer in expected for answer in answers)
    assert streamed(url, PROMPTS[0]) == expected[0]


def test_an_ingress_that_is_killed_takes_its_own_streams_alone_and_comes_back(
    cluster: Cluster, expected: list[tuple[str, int]]
) -> None:
    pids = pids_by_replica(cluster, "ingress")
    load = Load(cluster, MORE_TOKENS)
    held = by_replica(whole_page(cluster), "num_requests_open", "ingress")
    assert held.keys() == pids.keys()
    most, victim = max((num_open, name) for name, num_open in held.items())
    kill([pids[victim]])
    kept = load.kept()
    assert 0 < kept.count(None) <= most < len(PROMPTS)
    both = zip(kept, expected, strict=True)
    assert all(one is None or is_more_of(one, beginning) for one, beginning in both)
    wait_until(lambda: len(set(cluster.replicas("ingress")) - {pids[victim]}) == 2, BACK_S)
    wait_until(cluster.is_ready, BACK_S, cluster.said)
    assert streamed(cluster.url, PROMPTS[0]) == expected[0]


@pytest.mark.parametrize("part", ["ray::HAProxyManager", HAPROXY])
def test_a_front_that_is_killed_under_load_comes_back(
    cluster: Cluster, expected: list[tuple[str, int]], part: str
) -> None:
    """With it go at most the answers that go through it, of which workers keep nothing."""
    load, before = Load(cluster), set(cluster.matching(HAPROXY))
    kill(cluster.matching(part))
    wait_until(lambda: bool(set(cluster.matching(HAPROXY)) - before), BACK_S, cluster.said)
    wait_until(lambda: not set(cluster.matching(HAPROXY)) & before, BACK_S, cluster.said)
    kept = load.kept()
    assert all(one in (None, whole) for one, whole in zip(kept, expected, strict=True))
    wait_until(cluster.is_ready, BACK_S, cluster.said)
    assert all_at_once(cluster, PROMPTS[:2]) == expected[:2]
    wait_until(lambda: is_idle(page_of(cluster)), GONE_S, lambda: page_of(cluster))


def test_new_knobs_roll_out_under_load(cluster: Cluster, expected: list[tuple[str, int]]) -> None:
    """Every replica is replaced, the new ones first, and one of two ingresses goes for good;
    answers that outlast `drain_s` move. From then on decode workers read no prompt themselves."""
    pools = ("prefill", "decode", "ingress")
    before = {pid for pool in pools for pid in cluster.replicas(pool)}
    log = cluster.controller_log()
    num = {pool: len(cluster.replicas(pool)) for pool in pools}
    assert (num["prefill"], num["ingress"]) == (1, 2)
    with (
        hardly_any_asked_again(),
        idle_meanwhile(cluster),
        keep_asking(cluster) as answers,
        keep_asking_otherwise(cluster, *expected[0]) as counts,
    ):
        knobs = {"engine": {**ENGINE, "max_num_seqs": 12}, "local_prefill": "never"}
        cluster.redeploy(**ARGS, **knobs, drain_s=0.2)
        wait_until(lambda: len(cluster.replicas("ingress")) == 1, BACK_S, cluster.said)
    assert all(answer in expected for answer in answers)
    assert answers
    assert counts.keys() == {"tokens", "official"}

    def left() -> set[int]:
        return before & {pid for pool in pools for pid in cluster.replicas(pool)}

    wait_until(lambda: not left(), BACK_S, cluster.left)
    meanwhile = cluster.controller_log()[len(log) :]
    for pool, before_it in num.items():
        least = min(before_it, len(cluster.replicas(pool)))
        assert least_ready(meanwhile, pool, before_it) == least, meanwhile + cluster.said()


def least_ready(log: str, pool: str, num_ready: int) -> int:
    """Of a pool's replicas, at any time, by what Serve's controller says that it does."""
    told = re.findall(rf"(Stopping )?Replica\(.*'{pool}'.*\) (?:started|\(currently)", log)
    assert {"", "Stopping "} == set(told), log
    numbers = accumulate((-1 if one else 1 for one in told), initial=num_ready)
    return min(numbers)


def test_a_prefill_worker_that_is_killed_at_work_costs_no_request_and_comes_back(
    cluster: Cluster, expected: list[tuple[str, int]]
) -> None:
    """Long prompts come all the time, which nobody else may read."""
    wait_until(lambda: len(usable_workers(cluster)) == 3, BACK_S, cluster.said)
    before = by_replica(whole_page(cluster), "leases_granted_total", "prefill").keys()

    def another_reads() -> bool:
        granted = by_replica(page_of(cluster), "leases_granted_total", "prefill")
        return any(number for replica, number in granted.items() if replica not in before)

    load = Load(cluster)
    with asking_to_read(cluster) as answers:
        wait_until(lambda: total(page_of(cluster), "leases", 'pool="prefill"') > 0, AT_WORK_S)
        kill(cluster.replicas("prefill"))
        wait_until(another_reads, BACK_S, lambda: routing(cluster))
    assert load.results() == expected
    again = list(answers)[-NUM_UNREAD:]
    assert [short_answer(cluster, prompt) for prompt in again] == [answers[p] for p in again]
    wait_until(lambda: len(usable_workers(cluster)) == 3, BACK_S, cluster.said)


def test_another_model_rolls_out_under_load(
    cluster: Cluster, expected: list[tuple[str, int]], tmp_path: Path
) -> None:
    """Each answer is the one model's or the other's, from its beginning to its end. The other one
    is served by a worker alone, to which nobody hands over anything; of the one no decode worker
    may read a prompt, and so its prefill worker stays as long."""
    write_other_model(tmp_path / "other")
    args = {**ARGS, "model": str(tmp_path / "other"), "served_model_name": ["mine", "other"]}
    args |= {"prefill": {"replicas": 0}, "decode": {"replicas": 1}}
    with hardly_any_asked_again(), keep_asking(cluster) as answers:
        cluster.redeploy(**args, engine=ENGINE, drain_s=0.2)
        wait_until(lambda: model_names(cluster) == ["mine", "other"], BACK_S, cluster.said)
        # The front may ask an old ingress for as long as there is one.
        wait_until(lambda: len(cluster.replicas("ingress")) == 1, BACK_S, cluster.said)
    of_other = all_at_once(cluster, PROMPTS[:NUM_ASKERS])
    assert not set(of_other) & set(expected)
    assert all(answer in expected or answer in of_other for answer in answers)
    assert any(answer in expected for answer in answers)
    wait_until(lambda: len(cluster.replicas("decode")) == 1, BACK_S, cluster.said)
    wait_until(lambda: not cluster.replicas("prefill"), BACK_S, cluster.said)


def workers(cluster: Cluster) -> set[str]:
    """Replicas of both pools that answer."""
    page = http.get(f"{cluster.url}/metrics", timeout=30).text
    return set(re.findall(r'^kvrelay:drawn_tokens_total{.*replica="(\w+)"', page, re.MULTILINE))


def model_names(cluster: Cluster) -> list[str]:
    return [one["id"] for one in http.get(f"{cluster.url}/v1/models").json()["data"]]


def test_ctrl_c_tells_clients_and_leaves_nothing(cluster: Cluster) -> None:
    """More is asked for than can be answered in the time that is left."""
    folder, begun = cluster.front_folder, threading.Event()

    def read(_: int) -> list[str]:
        lines: list[str] = []
        with http.stream(
            "POST",
            f"{cluster.url}/v1/completions",
            json=body([PROMPTS[0]] * NUM_WAITING, max_tokens=MANY_TOKENS, n=8, stream=True),
            timeout=60,
        ) as response:
            for line in response.iter_lines():
                lines += [line] if line else []
                begun.set()
        return lines

    with ThreadPoolExecutor(NUM_READERS) as threads:
        readers = [threads.submit(read, number) for number in range(NUM_READERS)]
        assert begun.wait(60)
        cluster.interrupt()
        was_cut = cluster.wait_for_end(ENDED_S)
        streams = [lines for reader in readers if len(lines := reader.result(30)) > 1]
    assert was_cut == ("stopped at once" in cluster.said())
    assert all(lines[-1] == "data: [DONE]" for lines in streams)
    assert any("the server is stopping" in lines[-2] for lines in streams)
    assert not folder.exists()
