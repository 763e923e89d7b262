from collections.abc import Callable

import pytest

from engine.describe_worker import describe_format
from kv_cache.layout import KV_FORMATS, BlockLayout, KvGroup
from kv_transfer.compatible import check_caller, check_format, check_holder
from kv_transfer.errors import IncompatiblePeer
from protos.limits import PROTOCOL
from protos.worker_pb2 import CacheFormat, CacheGroup, DescribeRequest, WorkerDescription

GROUPS = (KvGroup((0, 2), 4, (64, 64)), KvGroup((1,), 4, (64, 64), window=512))
LAYOUTS = [BlockLayout(group, 16, KV_FORMATS["bf16"]) for group in GROUPS]
FORMAT = describe_format("hub:abc", LAYOUTS)


def changed(change: Callable[[CacheFormat], object]) -> CacheFormat:
    copy = CacheFormat.FromString(FORMAT.SerializeToString())
    change(copy)
    return copy


CHANGES: dict[str, Callable[[CacheFormat], object]] = {
    "fingerprint": lambda f: setattr(f, "fingerprint", "hub:abd"),
    "kv_format": lambda f: setattr(f, "kv_format", "fp16"),
    "block_size": lambda f: setattr(f, "block_size", 64),
    "tensor_parallel": lambda f: setattr(f, "tensor_parallel", 2),
    "groups": lambda f: f.groups.add(),
    "groups[0].num_layers": lambda f: setattr(f.groups[0], "num_layers", 3),
    "groups[1].num_kv_heads": lambda f: setattr(f.groups[1], "num_kv_heads", 2),
    "groups[0].widths": lambda f: f.groups[0].widths.append(1),
    "groups[1].window": lambda f: f.groups[1].ClearField("window"),
    "groups[0].window": lambda f: setattr(f.groups[0], "window", 0),
    "groups[1].blob_bytes": lambda f: setattr(f.groups[1], "blob_bytes", 4096),
}


@pytest.mark.parametrize("field", CHANGES)
def test_the_first_difference_is_named_from_either_side(field: str) -> None:
    other = changed(CHANGES[field])
    for ours, theirs in ((FORMAT, other), (other, FORMAT)):
        with pytest.raises(IncompatiblePeer) as caught:
            check_format(ours, theirs)
        assert caught.value.field == field
        assert not caught.value.retryable


def test_formats_of_one_size_are_told_apart() -> None:
    one, other = (
        describe_format("hub:abc", [BlockLayout(group, 16, KV_FORMATS[name]) for group in GROUPS])
        for name in ("fp8_e4m3", "fp8_e5m2")
    )
    assert [g.blob_bytes for g in one.groups] == [g.blob_bytes for g in other.groups]
    with pytest.raises(IncompatiblePeer, match="kv_format: ours is fp8_e4m3"):
        check_format(one, other)


def test_every_field_is_compared() -> None:
    leaves = {f.name for f in CacheFormat.DESCRIPTOR.fields}
    leaves |= {f"groups.{f.name}" for f in CacheGroup.DESCRIPTOR.fields}
    tested = {field.replace("[0]", "").replace("[1]", "") for field in CHANGES}
    assert leaves == tested


def test_both_values_are_told() -> None:
    with pytest.raises(IncompatiblePeer, match="block_size: ours is 16, the peer's is 64"):
        check_format(FORMAT, changed(CHANGES["block_size"]))


def test_of_long_values_the_beginnings_are_told() -> None:
    """Whoever refuses a peer tells it so, and gRPC loses what does not fit into a header."""
    peer = changed(lambda f: setattr(f, "fingerprint", "x" * 1_000_000))
    with pytest.raises(IncompatiblePeer, match="hub:abc, the peer's is x{200}[.]{3}$"):
        check_format(FORMAT, peer)


def test_callers() -> None:
    ingress = DescribeRequest(protocol=PROTOCOL)
    check_caller(FORMAT, ingress)
    check_caller(FORMAT, DescribeRequest(protocol=PROTOCOL, format=changed(lambda f: None)))
    with pytest.raises(IncompatiblePeer, match="protocol: "):
        check_caller(FORMAT, DescribeRequest(protocol=PROTOCOL + 1, format=FORMAT))
    with pytest.raises(IncompatiblePeer, match="fingerprint: "):
        check_caller(FORMAT, DescribeRequest(protocol=PROTOCOL, format=CacheFormat()))


def test_a_holder_must_give_its_format() -> None:
    check_holder(FORMAT, WorkerDescription(protocol=PROTOCOL, format=FORMAT))
    with pytest.raises(IncompatiblePeer, match="format: "):
        check_holder(FORMAT, WorkerDescription(protocol=PROTOCOL))


def test_the_format_is_what_the_layouts_are() -> None:
    full, window = FORMAT.groups
    assert (full.num_layers, list(full.widths), full.HasField("window")) == (2, [64, 64], False)
    assert (window.num_layers, window.window) == (1, 512)
    # 4 heads x 2 layers x (K and V) x 16 tokens x 64 elements of 2 bytes, whole pages already
    assert full.blob_bytes == 4 * 2 * 2 * 16 * 64 * 2
    assert (FORMAT.block_size, FORMAT.kv_format, FORMAT.tensor_parallel) == (16, "bf16", 1)
