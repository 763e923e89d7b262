"""Blobs from another process's pool into ours, beside memcpy and beside the bare system calls.

    python -m benchmarks.transfer [--json FILE] [--only nixl socket]

All sides copy the same randomly drawn blobs, in turns, so that a drift of the machine meets
each of them. Rates are medians over the turns; of few turns the p99 is the longest. Memory is
touched before.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine, table
from benchmarks.process import ROOT
from benchmarks.transfer_pools import BLOB_BYTES, BenchPool
from benchmarks.transfer_sides import BareCma, BareSocket, ConnectorSide, Memcpy, Side
from kv_cache.events import new_incarnation
from kv_transfer.connector import Connector
from kv_transfer.nixl_connector import NixlConfig
from kv_transfer.registry import ConnectorConfig, open_connector

MIB = 1 << 20
TOTALS = (1 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
GROUP_BYTES = 288 * MIB
TURNS = {1 * MIB: 200, 16 * MIB: 60, 64 * MIB: 25, 256 * MIB: 10}
SETTLE_S, IDLE_S = 3.0, 4.0

MEMCPY, BARE_SOCKET, BARE_CMA = "memcpy", "bare sockets", "bare CMA"
BARE = {"nixl": BARE_CMA, "socket": BARE_SOCKET}
HEADINGS = (
    "connector",
    "blob KiB",
    "total MiB",
    "GB/s",
    "p50 ms",
    "p99 ms",
    "memcpy GB/s",
    "share of memcpy",
    "bare GB/s",
    "share of bare",
)


class Holder:
    """The process that is read from."""

    def __init__(self, names: Sequence[str]) -> None:
        arguments = [json.dumps(list(names)), str(GROUP_BYTES)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.transfer_holder", *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.info = self._answer()

    @property
    def session(self) -> int:
        return self._process.pid

    def ask(self, order: str) -> float:
        assert self._process.stdin
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout
        return json.loads(self._process.stdout.readline())


class Benchmark:
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.ours = BenchPool(GROUP_BYTES, fill=0)
        self.source = BenchPool(GROUP_BYTES, fill=1)
        self.holder = Holder([name for name in names if name != "inprocess"])
        self.sides: dict[str, Side] = {}
        self.rows: list[dict[str, Any]] = []
        self.idle = 0.0  # share of a core that both processes take

    async def open(self, stack: AsyncExitStack) -> None:
        stack.callback(self.holder.close)
        info = self.holder.info
        self.holder.ask("expect")
        for name in self._names:
            connector = await self._open(stack, name, self.ours)
            if name == "inprocess":
                incarnation, metadata = self._source_incarnation, self._source.metadata()
            else:
                incarnation = info["incarnation"]
                metadata = bytes.fromhex(info["metadata"][name])
            self.sides[name] = ConnectorSide(await connector.connect(incarnation, metadata))
        self.sides[MEMCPY] = Memcpy(self.ours, self.source)
        if "socket" in self._names:
            self.sides[BARE_SOCKET] = BareSocket(self.ours, info["bare_port"])
        if "nixl" in self._names:
            lanes = NixlConfig().lanes
            self.sides[BARE_CMA] = BareCma(self.ours, info["pid"], info["addresses"], lanes)

    async def _open(self, stack: AsyncExitStack, name: str, pool: BenchPool) -> Connector:
        if name == "inprocess":
            self._source_incarnation = new_incarnation()
            self._source = await open_connector(
                name, self.source.regions, self._source_incarnation, ConnectorConfig()
            )
            stack.push_async_callback(self._source.close)
        connector = await open_connector(name, pool.regions, new_incarnation(), ConnectorConfig())
        stack.push_async_callback(connector.close)
        return connector

    async def measure(self, group: int, total: int) -> None:
        blob_bytes = BLOB_BYTES[group]
        num_blocks, count = GROUP_BYTES // blob_bytes, total // blob_bytes
        rng = np.random.default_rng(total + group)
        times: dict[str, list[float]] = {name: [] for name in self.sides}
        for turn in range(-1, TURNS[total]):
            remote, local = (rng.permutation(num_blocks)[:count].tolist() for _ in range(2))
            for name, side in self.sides.items():
                started = time.perf_counter()
                await side.copy(group, remote, local)
                elapsed = time.perf_counter() - started
                if turn >= 0:  # the first one connects and warms
                    times[name].append(elapsed)
                self._check(group, remote, local)
        self._keep(blob_bytes, total, times)

    def _check(self, group: int, remote: list[int], local: list[int]) -> None:
        """The blobs' first bytes, which are erased again for the next one's turn."""
        ours = self.ours.blobs[group]
        if not np.array_equal(ours[local, 0], self.source.blobs[group][remote, 0]):
            raise AssertionError("blobs arrived in the wrong places")
        ours[local, 0] = 0

    def _keep(self, blob_bytes: int, total: int, times: dict[str, list[float]]) -> None:
        rates = {name: total / statistics.median(taken) / 1e9 for name, taken in times.items()}
        for name in self._names:
            bare = rates.get(BARE.get(name, ""))
            row = {
                "connector": name,
                "blob KiB": blob_bytes >> 10,
                "total MiB": total >> 20,
                "GB/s": rates[name],
                "p50 ms": 1e3 * statistics.median(times[name]),
                "p99 ms": 1e3 * float(np.percentile(times[name], 99)),
                "memcpy GB/s": rates[MEMCPY],
                "share of memcpy": rates[name] / rates[MEMCPY],
                "bare GB/s": bare,
                "share of bare": rates[name] / bare if bare else None,
            }
            self.rows.append(row)
            print(" ".join(_cells(row)), file=sys.stderr, flush=True)

    async def measure_idle(self) -> None:
        """When nothing is read, and nobody has connected just now."""
        await asyncio.sleep(SETTLE_S)
        before, started = self.holder.ask("cpu") + time.process_time(), time.perf_counter()
        await asyncio.sleep(IDLE_S)
        spent = self.holder.ask("cpu") + time.process_time() - before
        self.idle = spent / (time.perf_counter() - started)


def _cells(row: dict[str, Any]) -> list[str]:
    shares = ("share of memcpy", "share of bare")
    return [
        "-"
        if v is None
        else f"{v:.0%}"
        if k in shares
        else f"{v:.2f}"
        if isinstance(v, float)
        else str(v)
        for k, v in row.items()
    ]


async def _run(arguments: argparse.Namespace) -> None:
    load = os.getloadavg()[0]
    benchmark = Benchmark(arguments.only)
    sessions = {benchmark.holder.session}
    before, started = machine.CpuTime.now(sessions), time.perf_counter()
    async with AsyncExitStack() as stack:
        await benchmark.open(stack)
        await benchmark.measure_idle()
        benchmark.holder.ask("expect")
        for group in range(len(BLOB_BYTES)):
            for total in TOTALS:
                await benchmark.measure(group, total)
        wall_s = time.perf_counter() - started
        foreign_s = machine.CpuTime.now(sessions).foreign_since(before)
    foreign = max(0.0, foreign_s / wall_s / len(machine.cores()))
    described = machine.describe()
    print("python -m benchmarks.transfer " + " ".join(sys.argv[1:]))
    print("machine: " + ", ".join(f"{k} {v}" for k, v in described.items()))
    print(f"load before {load:.2f}; other processes took {foreign:.0%} of the CPU meanwhile")
    print(f"the pair of processes, idle: {benchmark.idle:.1%} of a core")
    print(table.lines([HEADINGS, *(_cells(row) for row in benchmark.rows)]))
    if arguments.json:
        result = {"machine": described, "foreign": foreign, "idle": benchmark.idle}
        arguments.json.write_text(json.dumps(result | {"rows": benchmark.rows}, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = ("nixl", "socket", "inprocess", "collective")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CONNECTOR")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(_run(_arguments()))
