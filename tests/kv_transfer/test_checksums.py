"""Checksums are of memory that this process can read; of a GPU's pool they are refused."""

import pytest

from kv_cache.transfers import TransferHold
from kv_transfer.checksum import CHECKSUMS_OF_CPU, checksum
from kv_transfer.config import ExchangeConfig
from kv_transfer.connector import PoolRegion
from kv_transfer.errors import ConnectorUnavailable
from kv_transfer.exchange import Exchange
from kv_transfer.faults import Faults
from protos.rpc import Plane
from protos.worker_pb2 import DescribeRequest
from tests.kv_transfer.fakes import FakeSource

ON_A_GPU = PoolRegion(address=0, num_blocks=8, blob_bytes=4096, memory="cuda")


def exchange(checksums: bool) -> Exchange:
    def never(_: TransferHold) -> None:
        raise AssertionError

    me = DescribeRequest(incarnation=1)
    config = ExchangeConfig(checksums=checksums)
    source = FakeSource()
    return Exchange(config, 16, me, [ON_A_GPU], [], Plane().channel, source, never, Faults())


async def test_a_worker_on_a_gpu_is_refused_them() -> None:
    with pytest.raises(ConnectorUnavailable, match=CHECKSUMS_OF_CPU):
        exchange(checksums=True)
    exchange(checksums=False)


def test_no_address_of_a_gpu_is_read() -> None:
    with pytest.raises(ConnectorUnavailable, match=CHECKSUMS_OF_CPU):
        checksum(ON_A_GPU, 0)
