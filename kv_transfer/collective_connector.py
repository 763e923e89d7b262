"""Pools read through a two-rank communicator for each pair of workers: NCCL on GPUs, Gloo on CPUs.

A pull is one-sided and a communicator is not, so the reader asks for blocks over a connection of
the socket connector, the control connection, and the blobs come through the communicator instead.
"""

import hmac
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from kv_transfer.block_pairs import Blocks
from kv_transfer.carrier import End
from kv_transfer.collective_gloo import GlooGroup, check_host
from kv_transfer.collective_nccl import NcclGroup, load, shared_id
from kv_transfer.collective_rendezvous import PROOF_BYTES, Lifeline, Rendezvous, proof
from kv_transfer.collective_staging import SLICE_BYTES, DeviceStaging, HostStaging, Staging
from kv_transfer.connector import PoolRegion
from kv_transfer.errors import ConnectorUnavailable, TransferError
from kv_transfer.socket_connector import SocketConfig, SocketConnector

NAME = "collective"
VERSION = 1
_MESSAGES = 2  # on their way at a time


class Group(Protocol):
    """Two ranks. What is posted ends in that order; any failure is an OSError, and the last.

    One thread owns it, and closes it before its buffers are used for anything else; `interrupt`,
    which ends a wait, is for any thread.
    """

    def send(self, data: Tensor) -> None: ...

    def receive(self, data: Tensor) -> None: ...

    def wait(self, seconds: float) -> None: ...

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


class CollectivePool:
    """Our pool, and the communicators through which its blobs go: all of one kind."""

    def __init__(self, regions: Sequence[PoolRegion], secret: bytes, config: SocketConfig) -> None:
        self.regions = tuple(regions)
        kinds = {(region.memory, region.device) for region in regions}
        if len(kinds) != 1:
            raise ConnectorUnavailable(f"memory: {sorted(kinds)}, a communicator moves one kind")
        if config.tls:
            raise ConnectorUnavailable("TLS: what goes through a communicator is not encrypted")
        self._secret = secret
        self._limits = config.limits
        self._host = config.advertise or config.host
        self._on_gpu = regions[0].memory == "cuda"
        self.transport = "nccl" if self._on_gpu else "gloo"
        if self._on_gpu:
            load()
        else:
            check_host(self._host)

    def carry(self, sock: socket.socket, end: End) -> "CollectiveCarrier":
        deadline = time.monotonic() + self._limits.answer_s
        rendezvous = Rendezvous(sock, end, deadline)
        nonces = rendezvous.agree(f"{VERSION} {self.transport} {SLICE_BYTES}")
        staging = self._staging()
        group = self._form(end, rendezvous)
        try:
            carrier = CollectiveCarrier(sock, group, staging, self._limits.stall_s)
        except BaseException:
            group.close()
            raise
        try:
            carrier.prove(self._secret, end, nonces, deadline)
        except BaseException:
            carrier.close()
            raise
        return carrier

    def _form(self, end: End, rendezvous: Rendezvous) -> Group:
        if self._on_gpu:
            unique = shared_id(end, rendezvous)
            return NcclGroup(unique, end, self.regions[0].device, self._limits.answer_s)
        return GlooGroup(end, rendezvous, self._host, self._limits.answer_s)

    def _staging(self) -> Staging:
        return DeviceStaging(self.regions) if self._on_gpu else HostStaging(self.regions)


class CollectiveCarrier:
    """One end of one communicator, which lives as long as its control connection.

    Two messages are on their way at a time: one is copied while the other crosses.
    """

    def __init__(self, sock: socket.socket, group: Group, staging: Staging, stall_s: float) -> None:
        self._group = group
        self._staging = staging
        self._stall_s = stall_s
        self._lifeline = Lifeline(sock, group.interrupt)

    def prove(self, secret: bytes, end: End, nonces: bytes, deadline: float) -> None:
        """That whoever the library has connected to is who is at the control connection."""
        for sender in End:
            if end is sender:
                self._group.send(self._staging.put(proof(secret, end, nonces)))
                self._group.wait(deadline - time.monotonic())
                continue
            theirs = self._staging.put(bytes(PROOF_BYTES))
            self._group.receive(theirs)
            self._group.wait(deadline - time.monotonic())
            said = theirs.cpu().numpy().tobytes()
            if not hmac.compare_digest(said, proof(secret, sender, nonces)):
                raise TransferError("another than the peer has taken its place in a communicator")

    def send(self, group: int, blocks: Blocks) -> None:
        parts = self._staging.slices(group, blocks)
        for turn, part in enumerate(parts):
            if turn >= _MESSAGES:
                self._group.wait(self._stall_s)
            buffer = self._staging.buffer(turn, group, part)
            self._staging.gather(group, part, buffer)
            self._group.send(buffer)
        for _ in parts[-_MESSAGES:]:
            self._group.wait(self._stall_s)

    def receive(self, group: int, blocks: Blocks, stopped: Callable[[], bool]) -> None:
        staging = self._staging
        parts = staging.slices(group, blocks)
        for turn, part in enumerate(parts[:_MESSAGES]):
            self._group.receive(staging.buffer(turn, group, part))
        for turn, part in enumerate(parts):
            self._group.wait(self._stall_s)
            if stopped():
                raise ConnectionError("not wanted any more")
            staging.scatter(group, part, staging.buffer(turn, group, part))
            if turn + _MESSAGES < len(parts):
                self._group.receive(staging.buffer(turn, group, parts[turn + _MESSAGES]))

    def close(self) -> None:
        self._lifeline.close()
        self._group.close()


class CollectiveConnector(SocketConnector):
    """One control connection to a peer, and one communicator with it."""

    name = NAME

    def __init__(
        self, regions: Sequence[PoolRegion], incarnation: int, secret: bytes, config: SocketConfig
    ) -> None:
        """`config`: of the control connections."""
        pool = CollectivePool(regions, secret, config)
        super().__init__(regions, incarnation, secret, replace(config, streams=1), pool)
