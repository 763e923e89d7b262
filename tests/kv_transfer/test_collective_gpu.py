"""The collective connector on a GPU. `benchmarks.gpu` runs these on a machine of its own, which has
no more than torch, pytest and what an engine imports: too little for processes that are forked."""

import asyncio
import signal
import socket
from contextlib import AsyncExitStack

import pytest
import torch

from kv_transfer.carrier import End
from kv_transfer.collective_connector import CollectiveCarrier, CollectivePool
from kv_transfer.collective_nccl import NcclGroup, load, new_id
from kv_transfer.collective_staging import DeviceStaging
from kv_transfer.connector import PoolRegion
from kv_transfer.errors import TransferError
from kv_transfer.socket_connector import SocketConfig
from tests.kv_transfer.children import ChildError, child
from tests.kv_transfer.ends import both

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL moves GPU memory")
CONFIG = SocketConfig()


def test_a_gpus_blobs_go_through_its_staging() -> None:
    blobs = torch.randint(0, 256, (64, 4096), dtype=torch.uint8, device="cuda")
    before = blobs.clone()
    region = PoolRegion(blobs.data_ptr(), 64, 4096, "cuda", blobs.device.index, blobs)
    staging = DeviceStaging([region])
    blocks = torch.randperm(64)[:20].numpy().astype("int32")
    buffer = staging.buffer(0, 0, blocks)
    staging.gather(0, blocks, buffer)
    assert torch.equal(buffer, before[blocks.tolist()])
    staging.scatter(0, blocks[::-1].copy(), buffer)
    assert torch.equal(blobs[blocks[::-1].tolist()], before[blocks.tolist()])


def test_gpus_blobs_of_another_process_whose_death_ends_no_other() -> None:
    """NCCL takes one GPU twice only of ranks that it takes to be on different hosts."""
    asyncio.run(read_until_the_holder_dies())


async def read_until_the_holder_dies() -> None:
    groups = ((64, 1 << 20),)
    blocks = list(range(64))
    async with AsyncExitStack() as stack:
        holder, reader = [
            await stack.enter_async_context(
                child(
                    "collective",
                    seed,
                    groups=groups,
                    memory="cuda",
                    prefix=("env", f"NCCL_HOSTID=host{seed}"),
                )
            )
            for seed in (1, None)
        ]
        peer = await reader.connect(holder)
        await reader.ask("read", peer, 0, blocks, blocks)
        assert await reader.ask("blob_sums", 0) == await holder.ask("blob_sums", 0)
        await reader.ask("read_for_ever", peer, 0, blocks)
        holder.signal(signal.SIGKILL)
        await holder.process.wait()
        with pytest.raises(ChildError) as lost:
            await reader.ask("read", peer, 0, blocks, blocks)
        assert lost.value.kind == "LinkLost"
        await reader.ask("blob_sums", 0)  # the GPU is there for the next peer


def test_two_ranks_on_one_gpu_are_refused_and_the_process_lives_on() -> None:
    """NCCL takes a GPU once; with two of them both ranks are made, prove themselves and read."""
    ends = socket.socketpair()
    num_gpus = torch.cuda.device_count()
    blobs = [
        torch.full((64, 4096), 7 * end, dtype=torch.uint8, device=f"cuda:{end % num_gpus}")
        for end in End
    ]

    def make(end: End) -> CollectiveCarrier:
        mine = blobs[end]
        region = PoolRegion(mine.data_ptr(), 64, 4096, "cuda", mine.device.index, mine)
        return CollectivePool([region], b"", CONFIG).carry(ends[end], end)

    made = both(make)
    if num_gpus == 1:
        assert all(isinstance(one.exception(), OSError | TransferError) for one in made)
        return
    blocks = torch.arange(64).numpy().astype("int32")
    carriers = [one.result() for one in made]

    def move(end: End) -> None:
        carrier = carriers[end]
        assert isinstance(carrier, CollectiveCarrier)
        if end is End.HOLDER:
            carrier.send(0, blocks)
        else:
            carrier.receive(0, blocks, lambda: False)
        carrier.close()

    for one in both(move):
        one.result()
    assert (blobs[End.READER] == 7).all()


def test_nccl_with_itself() -> None:
    """One rank: what one GPU allows of the calls that move bytes, and of the abort."""
    nccl, alone = load(), NcclGroup(new_id(), rank=0, device=0, form_s=30, num_ranks=1)
    data = torch.arange(1 << 20, device="cuda", dtype=torch.int32).view(torch.uint8)
    into = torch.zeros_like(data)
    torch.cuda.synchronize()
    with torch.cuda.device(0):
        assert nccl.ncclGroupStart() == 0
        for call, buffer in ((nccl.ncclSend, data), (nccl.ncclRecv, into)):
            stream = alone._stream.cuda_stream
            assert call(buffer.data_ptr(), buffer.nbytes, 1, 0, alone._comm, stream) in (0, 7)
        alone._settle(nccl.ncclGroupEnd())
    alone._stream.synchronize()
    assert torch.equal(data, into)
    alone.close()
