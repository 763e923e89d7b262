"""Many processes' pages as one, also when one of them does not answer."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.metrics.families import counter, histograms
from cluster.metrics.page import Collects, Page
from cluster.metrics.scrape import merge, scrape
from cluster.metrics.server import MetricsServer
from cluster.metrics.targets import KEY, Target, write_document
from cluster.metrics.whole import TIMEOUT_S, WholeCluster
from kv_transfer.histogram import Histogram


class Some:
    def __init__(self, number: float) -> None:
        self.number = number

    def collect(self) -> list[object]:
        observed = Histogram((0.5, 1.0))
        observed.observe(0.75)
        return [
            counter("things", "Things.", self.number),
            histograms("wait_seconds", "Waits.", "kind", [("a", observed)]),
        ]


def page_of(pool: str, replica: str, number: float) -> Page:
    some: Collects = Some(number)  # type: ignore[assignment]
    return Page({"model_name": "m", "pool": pool, "replica": replica}, [some])


@pytest.fixture
async def worker() -> AsyncIterator[str]:
    server = MetricsServer(page_of("decode", "d", 5).render)
    yield await server.start("127.0.0.1")
    await server.stop()


def things(page: bytes) -> dict[str, float]:
    families = {one.name: one for one in text_string_to_metric_families(page.decode())}
    return {s.labels["replica"]: s.value for s in families["kvrelay:things"].samples}


def up(page: bytes) -> dict[tuple[str, str], float]:
    families = {one.name: one for one in text_string_to_metric_families(page.decode())}
    samples = families["kvrelay:replica_up"].samples
    return {(s.labels["pool"], s.labels["replica"]): s.value for s in samples}


def cluster_of(own: str, file: Path | None = None) -> WholeCluster:
    target = Target("ingress", own, f"127.0.0.1:{own[-1]}")
    return WholeCluster(target, page_of("ingress", own, 1), "m", file)


async def test_all_pages_are_one(worker: str) -> None:
    cluster = cluster_of("i1")
    cluster.update("decode", {"d": {KEY: worker}, "says nothing": {}})
    page = await cluster.page()
    assert things(page) == {"i1": 1, "d": 5}
    assert up(page) == {("ingress", "i1"): 1, ("decode", "d"): 1}
    lines = page.decode().splitlines()
    assert len([line for line in lines if line.startswith("# TYPE kvrelay:things")]) == 1


async def test_who_asks_meanwhile_gets_the_same_page() -> None:
    """Also where the first one leaves before it is there."""
    page, scrapes, may_answer = page_of("decode", "d", 5), 0, asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal scrapes
        scrapes += 1
        await reader.readuntil(b"\r\n\r\n")
        await may_answer.wait()
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + page.render())
        writer.close()

    server = await asyncio.start_server(slow, "127.0.0.1", 0)
    cluster = cluster_of("i1")
    port = server.sockets[0].getsockname()[1]
    cluster.update("decode", {"d": {KEY: f"127.0.0.1:{port}"}})
    asking = [asyncio.create_task(cluster.page()) for _ in range(16)]
    while not scrapes:
        await asyncio.sleep(0)
    asking.pop(0).cancel()
    may_answer.set()
    pages = await asyncio.gather(*asking)
    assert things(pages[0]) == {"i1": 1, "d": 5}
    assert len(set(pages)) == scrapes == 1
    assert things(await cluster.page()) == {"i1": 1, "d": 5}
    assert scrapes == 2, "who comes later is told what is so then"
    server.close()


async def test_who_is_named_no_more_stays_for_as_long_as_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a worker does that drains."""
    monkeypatch.setattr("cluster.metrics.whole.LOOK_S", 0.05)
    server = MetricsServer(page_of("decode", "d", 5).render)
    address = await server.start("127.0.0.1")
    cluster = cluster_of("i1", tmp_path / "targets.json")
    cluster.update("decode", {"d": {KEY: address}})
    cluster.update("decode", {})
    assert things(await cluster.page()) == {"i1": 1, "d": 5}
    assert address in (tmp_path / "targets.json").read_text()
    await server.stop()
    page = await cluster.page()
    assert up(page) == {("ingress", "i1"): 1}, "it is gone, and nothing is wrong with it"
    async with asyncio.timeout(30):
        while len(cluster.targets()) > 1:
            await asyncio.sleep(0.01)
    assert address not in (tmp_path / "targets.json").read_text()


async def test_who_has_the_port_of_one_that_is_gone_is_not_taken_for_it(worker: str) -> None:
    cluster = cluster_of("i1")
    cluster.update("decode", {"gone": {KEY: worker}})
    cluster.update("decode", {"d": {KEY: worker}})
    assert things(await cluster.page()) == {"i1": 1, "d": 5}
    cluster.close()


async def test_a_process_that_is_stopped_holds_nobody_up(worker: str) -> None:
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    stopped = await asyncio.start_server(never, "127.0.0.1", 0)
    port = stopped.sockets[0].getsockname()[1]
    cluster = cluster_of("i1")
    cluster.update("decode", {"d": {KEY: worker}, "stopped": {KEY: f"127.0.0.1:{port}"}})
    cluster.update("prefill", {"gone": {KEY: "127.0.0.1:1"}})
    began = time.monotonic()
    page = await cluster.page()
    assert time.monotonic() - began < TIMEOUT_S + 8
    stopped.close()
    assert things(page) == {"i1": 1, "d": 5}
    assert up(page) == {
        ("ingress", "i1"): 1,
        ("decode", "d"): 1,
        ("decode", "stopped"): 0,
        ("prefill", "gone"): 0,
    }


async def test_what_is_no_page_is_missed() -> None:
    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n<html>")
        writer.close()

    server = await asyncio.start_server(other, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert await scrape(f"127.0.0.1:{port}", 1.0) is None
    server.close()


async def test_who_told_no_address_or_none_that_can_be_read_has_no_page(worker: str) -> None:
    cluster = cluster_of("i1")
    cluster.update("decode", {"d": {KEY: worker}, "silent": {KEY: ""}, "odd": {KEY: "nowhere"}})
    page = await cluster.page()
    assert things(page) == {"i1": 1, "d": 5}
    assert up(page) == {("decode", "d"): 1, ("decode", "odd"): 0, ("ingress", "i1"): 1}


def test_every_ingress_shows_the_same_series() -> None:
    one, two = (page_of("ingress", name, n).render() for name, n in (("i1", 1), ("i2", 2)))
    assert things(merge([one, two])) == things(merge([two, one])) == {"i1": 1, "i2": 2}


def test_bounds_are_counted_cumulatively() -> None:
    text = page_of("decode", "d", 0).render().decode()
    families = {one.name: one for one in text_string_to_metric_families(text)}
    samples = families["kvrelay:wait_seconds"].samples
    buckets = [(s.labels["le"], s.value) for s in samples if s.name.endswith("_bucket")]
    assert buckets == [("0.5", 0), ("1.0", 1), ("+Inf", 1)]


async def test_the_targets_are_a_document_and_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "targets.json"
    cluster = cluster_of("i1", file)
    cluster.update("decode", {"d": {KEY: "127.0.0.1:2"}})
    expected = [
        {
            "targets": [address],
            "labels": {"__meta_kvrelay_pool": pool, "__meta_kvrelay_replica": replica},
        }
        for pool, replica, address in (
            ("decode", "d", "127.0.0.1:2"),
            ("ingress", "i1", "127.0.0.1:1"),
        )
    ]
    assert cluster.targets() == json.loads(file.read_text()) == expected
    monkeypatch.setattr("cluster.metrics.whole.LOOK_S", 0.05)
    cluster.update("decode", {})
    async with asyncio.timeout(30):
        while json.loads(file.read_text()) != expected[1:]:
            await asyncio.sleep(0.01)
    assert [one.name for one in tmp_path.iterdir()] == ["targets.json"]


async def test_a_file_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    cluster = cluster_of("i1", tmp_path / "missing" / "targets.json")
    assert len(cluster.targets()) == 1


def test_a_document_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "targets").mkdir()
    with pytest.raises(IsADirectoryError):
        write_document(tmp_path / "targets", [])
    assert [one.name for one in tmp_path.iterdir()] == ["targets"]
