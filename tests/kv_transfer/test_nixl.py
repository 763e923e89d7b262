"""What loading NIXL does to its process, how agents are made, and what a GPU's can read."""

import asyncio
import subprocess
import sys
from typing import Any

import pytest
import torch

from kv_transfer import nixl
from tests.kv_transfer.children import child
from tests.kv_transfer.pools import Pool

LOADED = """
import logging, logging.handlers, sys
kept = logging.handlers.MemoryHandler(10, target=logging.StreamHandler(sys.stdout))
logging.getLogger("of somebody else's").addHandler(kept)
from kv_transfer import nixl
nixl.prepare_environment()
nixl.load()
logging.getLogger("of somebody else's").error("is heard")
logging.getLogger("nixl").error("is heard, too")
kept.flush()
assert logging.raiseExceptions
"""


def test_the_log_handlers_of_others_are_kept() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "is heard\n"
    assert "is heard, too" in done.stderr


def test_every_agent_has_a_name_of_its_own_and_is_told_to_be_strict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nixl.prepare_environment()
    api = nixl.load()
    make, made = api.nixl_agent, []

    def record(name: str, config: Any) -> Any:
        made.append((name, config.sync_mode, config.enable_pthread, config.backends))
        return make(name, config)

    monkeypatch.setattr(api, "nixl_agent", record)
    for _ in range(2):
        nixl.Agent(Pool().regions).close()
    strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    assert [rest for _, *rest in made] == [[strict, False, ["UCX"]]] * 2
    assert len({name for name, *_ in made}) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="of a GPU's memory")
@pytest.mark.parametrize("holders", ["cpu", "cuda"])
def test_blobs_cross_between_a_host_and_a_gpu(holders: str) -> None:
    pytest.importorskip("nixl")
    asyncio.run(read_across(holders, "cuda" if holders == "cpu" else "cpu"))


async def read_across(holders: str, readers: str) -> None:
    """In processes that are not forked: a GPU machine has too little for that."""
    groups = ((96, 1 << 20), (40, 12288))
    async with (
        child("nixl", 1, groups=groups, memory=holders, prefix=("env",)) as holder,
        child("nixl", groups=groups, memory=readers, prefix=("env",)) as reader,
    ):
        await holder.ask("expect_peer")
        peer = await reader.connect(holder)
        for group, (num_blocks, _) in enumerate(groups):
            remote, local = list(range(num_blocks))[::-1], list(range(num_blocks))
            await reader.ask("read", peer, group, remote, local)
            theirs = await holder.ask("blob_sums", group)
            assert await reader.ask("blob_sums", group) == theirs[::-1]
