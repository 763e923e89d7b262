"""What a worker tells its peers about its pool, in bytes that are checked as any input is."""

import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from kv_transfer.connector import PoolRegion
from kv_transfer.errors import IncompatiblePeer, TransferError

VERSION = 1
MAX_BYTES = 1 << 20
MAX_GROUPS = 64
MAX_BLOCKS = 2**31 - 1

_MAGIC = b"KVRP"
_TAG_BYTES = 16
_HEAD = struct.Struct(
    "<4sHHHQ"
)  # magic, version, bytes of the connector's name, groups, incarnation
_REGION = struct.Struct("<QIQBI")  # address, blocks, blob bytes, memory, device
_MEMORIES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class PoolDescription:
    """A pool as a peer may address it, and what its connector needs beside (`payload`)."""

    connector: str
    incarnation: int
    regions: tuple[PoolRegion, ...]
    payload: bytes

    def encode(self, secret: bytes) -> bytes:
        name = self.connector.encode()
        parts = [
            _HEAD.pack(_MAGIC, VERSION, len(name), len(self.regions), self.incarnation),
            name,
            *(_pack(region) for region in self.regions),
            self.payload,
        ]
        data = b"".join(parts)
        return data + _tag(secret, data)

    @classmethod
    def decode(cls, data: bytes, connector: str, secret: bytes) -> "PoolDescription":
        """TransferError unless it was encoded with the same secret; IncompatiblePeer if it is
        of another version or for another connector.
        """
        if not _HEAD.size + _TAG_BYTES <= len(data) <= MAX_BYTES:
            raise _malformed(f"{len(data)} bytes")
        body, tag = data[:-_TAG_BYTES], data[-_TAG_BYTES:]
        magic, version, name_bytes, num_regions, incarnation = _HEAD.unpack_from(body)
        if magic != _MAGIC:
            raise _malformed("not a pool's description")
        if version != VERSION:
            raise IncompatiblePeer("version", f"{version}, ours is {VERSION}")
        if not hmac.compare_digest(tag, _tag(secret, body)):
            raise _malformed("not made with this cluster's secret, or damaged")
        regions_at = _HEAD.size + name_bytes
        payload_at = regions_at + num_regions * _REGION.size
        if not 1 <= num_regions <= MAX_GROUPS or payload_at > len(body):
            raise _malformed(f"{num_regions} groups in {len(body)} bytes")
        name = body[_HEAD.size : regions_at]
        if name != connector.encode():
            raise IncompatiblePeer("connector", f"{name!r}, ours is {connector!r}")
        regions = tuple(
            _unpack(fields) for fields in _REGION.iter_unpack(body[regions_at:payload_at])
        )
        return cls(connector, incarnation, regions, body[payload_at:])

    def check_fits(self, ours: Sequence[PoolRegion], incarnation: int) -> None:
        """Blobs are copied whole, so each group's must be of one size on both sides."""
        if self.incarnation != incarnation:
            raise IncompatiblePeer(
                "incarnation", f"{self.incarnation:#x}, {incarnation:#x} was expected"
            )
        if len(self.regions) != len(ours):
            raise IncompatiblePeer("groups", f"{len(self.regions)}, ours are {len(ours)}")
        for group, (their, our) in enumerate(zip(self.regions, ours, strict=True)):
            if their.blob_bytes != our.blob_bytes:
                raise IncompatiblePeer(
                    "blob_bytes",
                    f"{their.blob_bytes} in group {group}, ours are {our.blob_bytes}",
                )


def _pack(region: PoolRegion) -> bytes:
    return _REGION.pack(
        region.address,
        region.num_blocks,
        region.blob_bytes,
        _MEMORIES.index(region.memory),
        region.device,
    )


def _unpack(fields: tuple[int, ...]) -> PoolRegion:
    address, num_blocks, blob_bytes, memory, device = fields
    if memory >= len(_MEMORIES):
        raise _malformed(f"memory kind {memory}")
    if not (1 <= num_blocks <= MAX_BLOCKS and blob_bytes >= 1):
        raise _malformed(f"{num_blocks} blocks of {blob_bytes} bytes")
    if address + num_blocks * blob_bytes >= 1 << 64:
        raise _malformed(f"a region that ends beyond memory, at {address:#x}")
    return PoolRegion(address, num_blocks, blob_bytes, _MEMORIES[memory], device)


def _tag(secret: bytes, data: bytes) -> bytes:
    key = blake2b(secret, digest_size=32).digest()
    return blake2b(data, digest_size=_TAG_BYTES, key=key, person=b"kvrelay pool").digest()


def _malformed(what: str) -> TransferError:
    return TransferError(f"metadata: {what}", retryable=False)
