"""A cluster without keys, and how many machines it has."""

from __future__ import annotations

import grpc
import httpx
import pytest
from ray.exceptions import RpcError

from cluster.access import check_access
from cluster.replicas import access_watch
from cluster.replicas.access_watch import AccessWatch
from protos.generation_pb2 import Failure, SamplingParams
from protos.ingress_pb2 import GenerateRequest, ListModels, ReadyRequest
from tests.cluster.conftest import Server, make_server
from tests.cluster.token_server import Refused, token_server
from tests.waiting import until

BODY = {"prompt": "x"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_watch, "PERIOD_S", 0.001)


class Nodes:
    """Of the cluster; None while its GCS is away."""

    def __init__(self) -> None:
        self.number: int | None = 1
        self.num_asked = 0

    def check(self) -> None:
        self.num_asked += 1
        if self.number is None:
            raise RpcError("away")  # type: ignore[no-untyped-call]
        check_access(None, False, host="127.0.0.1", num_nodes=self.number)

    async def seen(self, number: int | None) -> None:
        self.number, before = number, self.num_asked
        await until(lambda: self.num_asked >= before + 3)


async def ask(server: Server) -> httpx.Response:
    return await server.client.post("/v1/completions", json=BODY)


async def test_a_second_node_closes_it_and_its_going_opens_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server, nodes = make_server(), Nodes()
    watch = AccessWatch(server.gate, nodes.check)
    watch.start()
    await nodes.seen(1)
    assert (await ask(server)).status_code == 200
    await nodes.seen(2)
    refused = await ask(server)
    assert refused.status_code == 503
    assert "the cluster has 2 nodes" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) > 0
    for path in ("/v1/models", "/health", "/ready"):
        assert (await server.client.get(path)).status_code == 503
    assert (await server.client.get("/metrics")).status_code == 200
    await nodes.seen(None)  # nobody knows: it stays as it is
    assert (await ask(server)).status_code == 503
    await nodes.seen(1)
    assert (await ask(server)).status_code == 200
    await nodes.seen(None)
    assert (await ask(server)).status_code == 200
    await watch.stop()
    told = [one.getMessage() for one in caplog.records if one.name == "kvrelay.access"]
    assert ["refused" in words for words in told] == [True, False]  # once each


async def test_grpc_is_closed_too() -> None:
    message = GenerateRequest(token_ids=[5, 6, 7], params=SamplingParams(max_tokens=4))
    async with token_server() as server:
        await server.stub.GenerateWhole(message)
        nodes = Nodes()
        watch = AccessWatch(server.gate, nodes.check)
        watch.start()
        await nodes.seen(2)
        calls = (
            lambda: server.stub.GenerateWhole(message),
            lambda: server.stub.Models(ListModels()),
            lambda: server.stub.Ready(ReadyRequest()),
        )
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call()
            assert Refused(refused.value).failure.kind == Failure.KIND_UNAVAILABLE
        await watch.stop()
