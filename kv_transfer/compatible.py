"""Whether blobs of two workers are interchangeable, byte for byte."""

from kv_transfer.errors import IncompatiblePeer
from protos.limits import PROTOCOL
from protos.worker_pb2 import CacheFormat, CacheGroup, DescribeRequest, WorkerDescription

_FORMAT = ("fingerprint", "kv_format", "block_size", "tensor_parallel")
_GROUP = ("num_layers", "num_kv_heads", "widths", "window", "blob_bytes")
_SHOWN_CHARS = 200


def check_caller(ours: CacheFormat, request: DescribeRequest) -> None:
    """Of a caller that will pull, the format too; an ingress has none."""
    check_protocol(request.protocol)
    if request.HasField("format"):
        check_format(ours, request.format)


def check_holder(ours: CacheFormat, description: WorkerDescription) -> None:
    """Of a worker whose blobs we want to read."""
    check_protocol(description.protocol)
    if not description.HasField("format"):
        raise IncompatiblePeer("format", "the peer gives none")
    check_format(ours, description.format)


def check_protocol(theirs: int) -> None:
    if theirs != PROTOCOL:
        raise _differ("protocol", PROTOCOL, theirs)


def check_format(ours: CacheFormat, theirs: CacheFormat) -> None:
    """IncompatiblePeer for the first field that differs, in the order of the message."""
    for name in _FORMAT:
        if getattr(ours, name) != getattr(theirs, name):
            raise _differ(name, getattr(ours, name), getattr(theirs, name))
    if len(ours.groups) != len(theirs.groups):
        raise _differ("groups", f"{len(ours.groups)} groups", f"{len(theirs.groups)} groups")
    for number, (mine, other) in enumerate(zip(ours.groups, theirs.groups, strict=True)):
        _check_group(f"groups[{number}]", mine, other)


def _check_group(prefix: str, ours: CacheGroup, theirs: CacheGroup) -> None:
    for name in _GROUP:
        mine, other = _value(ours, name), _value(theirs, name)
        if mine != other:
            raise _differ(f"{prefix}.{name}", mine, other)


def _value(group: CacheGroup, name: str) -> object:
    if name == "window":
        return group.window if group.HasField("window") else None
    value = getattr(group, name)
    return list(value) if name == "widths" else value


def _differ(field: str, ours: object, theirs: object) -> IncompatiblePeer:
    return IncompatiblePeer(field, f"ours is {_shown(ours)}, the peer's is {_shown(theirs)}")


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."
