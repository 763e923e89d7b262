"""What a worker tells its peers about its engine: the handshake's side of EngineInfo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kv_cache.layout import BlockLayout
from protos import worker_pb2 as pb
from protos.limits import PROTOCOL

if TYPE_CHECKING:
    from engine.assemble import EngineInfo

NUM_RANKS = 1


def describe_format(fingerprint: str, layouts: Sequence[BlockLayout]) -> pb.CacheFormat:
    """`layouts` are those of the groups, in order; all have one block size and one format."""
    first = layouts[0]
    return pb.CacheFormat(
        fingerprint=fingerprint,
        kv_format=first.format.name,
        block_size=first.block_size,
        tensor_parallel=NUM_RANKS,
        groups=[_describe_group(layout) for layout in layouts],
    )


def _describe_group(layout: BlockLayout) -> pb.CacheGroup:
    group = layout.group
    return pb.CacheGroup(
        num_layers=layout.num_layers,
        num_kv_heads=group.num_kv_heads,
        widths=group.widths,
        window=group.window,
        blob_bytes=layout.blob_bytes,
    )


def describe_worker(
    info: EngineInfo,
    role: pb.Role.ValueType,
    version: str,
    incarnation: int,
    max_num_seqs: int,
    connectors: Sequence[pb.ConnectorOffer] = (),
) -> pb.WorkerDescription:
    """`incarnation` is the process's; `connectors` in the worker's order of preference."""
    return pb.WorkerDescription(
        protocol=PROTOCOL,
        version=version,
        incarnation=incarnation,
        role=role,
        model=info.source.name,
        format=describe_format(info.fingerprint, info.cache.layouts),
        connectors=connectors,
        limits=pb.Limits(
            max_model_len=info.shape.max_model_len,
            vocab_size=info.model.vocab_size,
            max_num_seqs=max_num_seqs,
            num_blocks=info.cache.num_blocks,
        ),
    )
