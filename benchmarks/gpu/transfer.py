"""Blobs between two processes over NIXL: on one card, and between the card and pinned memory.

A link that UCX has no one-sided way for is refused, and says so: a worker would use sockets then.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.gpu.bench import COPY, Bench
from benchmarks.gpu.blobs import Blobs
from benchmarks.process import ROOT
from kv_cache.events import new_incarnation
from kv_transfer.connector import PeerPool
from kv_transfer.errors import TransferError
from kv_transfer.registry import ConnectorConfig, open_connector

BLOB_BYTES = 8 << 20  # 64 tokens of Llama-3.1-8B in bf16
NUM_BLOCKS, NUM_READ, TURNS = 192, 128, 9  # 1.5 GiB on either side, 1 GiB in a turn
READ_S = 20.0
OURS, THEIRS = 0, 100  # numbers of the first blobs


def run(bench: Bench) -> None:
    """On a machine without a card host memory stands for both."""
    pairs = [("cuda", "cuda"), ("cpu", "cuda"), ("cuda", "cpu")]
    if bench.device.type == "cpu":
        pairs = [("cpu", "cpu")]
    for theirs, ours in pairs:
        case = f"NIXL, {_called(theirs)} to {_called(ours)}"
        try:
            asyncio.run(_measure(bench, case, theirs, ours))
        except TransferError as error:
            bench.say(f"{case}: {error}")
            bench.figure(f"{case}: refused, see the log", "GB/s", 0.0)


def _called(memory: str) -> str:
    return "card" if memory == "cuda" else "host"


async def _measure(bench: Bench, case: str, theirs: str, ours: str) -> None:
    num_blocks, num_read, blob_bytes = NUM_BLOCKS, NUM_READ, BLOB_BYTES
    if bench.smoke:
        num_blocks, num_read, blob_bytes = 6, 4, 64 << 10
    blobs = Blobs.make(ours, num_blocks, blob_bytes, OURS)
    config, moved = ConnectorConfig(), num_read * blob_bytes
    with _holder(theirs, num_blocks, blob_bytes) as known:
        connector = await open_connector("nixl", [blobs.region], new_incarnation(), config)
        try:
            metadata = bytes.fromhex(known["metadata"])
            pool = await connector.connect(known["incarnation"], metadata)
            times = []
            for turn in range(-1, 1 if bench.smoke else TURNS):
                remote, local = (torch.randperm(num_blocks)[:num_read].tolist() for _ in range(2))
                took_s = await _read(pool, remote, local)
                if turn >= 0:  # the first one connects
                    times.append(took_s)
                wrong = blobs.share_of_others(local, remote, THEIRS)
                if wrong or turn < 0:
                    bench.check(f"{case}, bytes", wrong, 0.0)
            rate = moved / sorted(times)[len(times) // 2] / 1e9
            limit = _limit(bench, theirs, ours, blobs)
            bench.figure(
                f"{case} ({pool.transport}), {num_read} blobs of {blob_bytes >> 10} KiB",
                "GB/s",
                rate,
                share=rate / limit,
                share_of=f"{limit:.4g} GB/s, a plain copy",
                goal=0.8,
            )
        finally:
            await connector.close()


async def _read(pool: PeerPool, remote: list[int], local: list[int]) -> float:
    started = time.perf_counter()
    read = pool.read(0, remote, local)
    done, _ = await asyncio.wait({read.ended}, timeout=READ_S)
    if not done:
        raise TransferError(f"a READ did not end within {READ_S:.0f} s")
    read.ended.result()
    return time.perf_counter() - started


def _limit(bench: Bench, theirs: str, ours: str, blobs: Blobs) -> float:
    """GB/s of one copy between such memories in one process."""
    copied = bench.earlier("limits", COPY) if theirs == ours == "cuda" else None
    if copied is not None:
        return copied / 2  # that one counts what is read and what is written
    other = Blobs.make(theirs, blobs.num_blocks, blobs.blob_bytes, THEIRS)
    seconds = bench.seconds_of_calls(lambda: blobs.data.copy_(other.data, non_blocking=True))
    return blobs.data.numel() / seconds / 1e9


@contextmanager
def _holder(memory: str, num_blocks: int, blob_bytes: int) -> Iterator[dict[str, Any]]:
    numbers = (str(number) for number in (num_blocks, blob_bytes, THEIRS))
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu.transfer_holder", memory, *numbers],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise TransferError("the process to be read from ended, see the log")
            yield json.loads(line)
        finally:
            process.stdin.close()
