"""NIXL's agent as we use it; the only place that imports nixl.

UCX emulates READ over TCP: the holder then sends, and bytes arrive after the reader has given
its blocks away. So the emulation is off, and a READ either is one-sided or is refused.
"""

import contextlib
import logging
import logging.config
import os
import sys
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, NewType

import numpy as np

from kv_transfer.block_pairs import Blocks
from kv_transfer.connector import PoolRegion
from kv_transfer.errors import ConnectorUnavailable, LinkLost, TransferError

RemoteName = NewType("RemoteName", str)

_EMULATION = "UCX_PROTO_EMULATION_ENABLE"
_CUDA_IPC_GET = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
_SEGMENTS = {"cpu": "DRAM", "cuda": "VRAM"}


class ReadRefused(TransferError):
    """A post failed because UCX has no way to the peer that needs no help, or none any more."""


def prepare_environment() -> None:
    """What UCX must find in the environment when nixl is loaded; before that, and only once."""
    if "nixl" in sys.modules and os.environ.get(_EMULATION) != "n":
        raise ConnectorUnavailable(f"nixl was loaded before {_EMULATION}=n was set")
    os.environ[_EMULATION] = "n"
    # Off by default without NVLink: a READ from a GPU of this host would need the holder. Whoever
    # reads one may have its own pool in host memory.
    os.environ[_CUDA_IPC_GET] = "on"
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")  # of that one, where CUDA is missing
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    os.environ.setdefault("UCX_LOG_FILE", "stderr")


def load() -> Any:
    """The module nixl._api; loads torch too, so it takes a second the first time."""
    try:
        with _logging_left_alone():
            import nixl._api
    except ImportError as e:
        raise ConnectorUnavailable(f"nixl cannot be loaded: {e}") from e
    return nixl._api


@contextlib.contextmanager
def _logging_left_alone() -> Iterator[None]:
    """NIXL configures the process's logging when it is loaded, which closes every handler that is
    there. Serve's replicas would lose their log files, and Serve, when its controller starts anew,
    every replica without one. What NIXL says goes where ours does."""
    configure, raises = logging.config.dictConfig, logging.raiseExceptions
    logging.config.dictConfig = lambda config: None
    try:
        yield
    finally:
        logging.config.dictConfig, logging.raiseExceptions = configure, raises


class Transfer:
    """A posted READ. It writes until `Agent.poll` says that it has ended."""

    __slots__ = ("handle",)

    def __init__(self, handle: Any) -> None:
        self.handle = handle


class Agent:
    """One agent with our pool registered. Not thread-safe: one thread owns it.

    Every failure is a TransferError; after one of `post` or `poll` the transfer writes no more.
    """

    def __init__(self, regions: Sequence[PoolRegion]) -> None:
        self._api = load()
        names = dir(self._api.nixlBind)
        exceptions = [getattr(self._api.nixlBind, n) for n in names if n.endswith("Error")]
        self._errors: tuple[type[Exception], ...] = (RuntimeError, *exceptions)
        self._disconnected: type[Exception] = self._api.nixlBind.nixlRemoteDisconnectError
        # Progress threads spin: a whole core for an idle agent.
        config = self._api.nixl_agent_config(
            enable_prog_thread=False,
            sync_mode=self._api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
            backends=["UCX"],
        )
        # A name that came back with a restarted worker would find the old one's keys.
        try:
            self._agent = self._api.nixl_agent(uuid.uuid4().hex, config)
        except self._errors as e:
            raise ConnectorUnavailable(f"nixl cannot make an agent: {e}") from e
        if "UCX" not in self._agent.backends:
            raise ConnectorUnavailable("nixl has no UCX plugin")
        self._registered = [self._register(region) for region in regions]
        self._local = [self._blocks("NIXL_INIT_AGENT", region) for region in regions]

    def metadata(self) -> bytes:
        data: bytes = self._agent.get_agent_metadata()
        return data

    def add_peer(self, metadata: bytes) -> RemoteName:
        try:
            name: bytes = self._agent.add_remote_agent(metadata)
        except self._errors as e:
            raise TransferError(f"nixl does not accept the peer: {e}") from e
        try:
            return RemoteName(name.decode())
        except UnicodeDecodeError as e:
            self.remove_peer(name)
            raise TransferError("nixl does not accept the peer: its name is no text") from e

    def remove_peer(self, name: RemoteName | bytes) -> None:
        with contextlib.suppress(*self._errors):  # it is gone either way
            self._agent.remove_remote_agent(name)

    def peer_blocks(self, name: RemoteName, region: PoolRegion) -> Any:
        """The peer's blocks, to be named by number; lies outside what it registered: an error."""
        try:
            return self._blocks(name, region)
        except self._errors as e:
            raise TransferError(f"the peer's pool is not what it registered: {e}") from e

    def post(self, group: int, local: Blocks, peer_blocks: Any, remote: Blocks) -> Transfer | None:
        """Starts a READ; None if it is done already, as over CMA, where this call copies."""
        try:
            handle = self._agent.make_prepped_xfer(
                "READ", self._local[group], local, peer_blocks, remote
            )
            transfer = Transfer(handle)
            status = self._agent.transfer(handle)
        except self._disconnected as e:
            raise ReadRefused("the READ was refused") from e
        except self._errors as e:
            raise TransferError(f"the READ could not be posted: {e}") from e
        return None if self._has_ended(transfer, status) else transfer

    def poll(self, transfer: Transfer) -> bool:
        """Whether every byte has arrived."""
        try:
            status = self._agent.check_xfer_state(transfer.handle)
        except self._errors as e:
            raise LinkLost(f"the READ failed: {e}") from e
        return self._has_ended(transfer, status)

    def progress(self) -> None:
        """Lets peers connect to us; they need it a few times before their first READ."""
        with contextlib.suppress(*self._errors):  # one peer's end is no matter of the others
            self._agent.get_new_notifs()

    def release_blocks(self, peer_blocks: Any) -> None:
        with contextlib.suppress(*self._errors):
            self._agent.release_dlist_handle(peer_blocks)

    def close(self) -> None:
        """Only without open transfers and peers."""
        for blocks in self._local:
            self.release_blocks(blocks)
        for registered in self._registered:
            with contextlib.suppress(*self._errors):
                self._agent.deregister_memory(registered)

    def _has_ended(self, transfer: Transfer, status: str) -> bool:
        if status == "PROC":
            return False
        with contextlib.suppress(*self._errors):
            self._agent.release_xfer_handle(transfer.handle)
        if status != "DONE":
            raise LinkLost(f"the READ ended as {status}")
        return True

    def _register(self, region: PoolRegion) -> Any:
        run = [(region.address, region.num_bytes, region.device, "")]
        try:
            return self._agent.register_memory(run, _SEGMENTS[region.memory])
        except self._errors as e:
            raise ConnectorUnavailable(
                f"nixl cannot register {region.num_bytes} bytes of {region.memory} memory: {e}"
            ) from e

    def _blocks(self, name: str, region: PoolRegion) -> Any:
        """One strided descriptor: 0.1 ms for a pool of 100,000 blocks, 25 with one for each."""
        size = region.blob_bytes
        row = np.array([[region.address, size, region.device, size, region.num_blocks]], np.uint64)
        return self._agent.prep_xfer_dlist(name, row, _SEGMENTS[region.memory])
