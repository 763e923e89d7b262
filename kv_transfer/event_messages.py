"""A cache's events as messages of the wire, and back."""

from collections.abc import Iterator, Sequence
from typing import assert_never

from kv_cache.events import Cleared, EventBatch, KvEvent, Removed, Snapshot, Stored
from kv_cache.names import NAME_BYTES, BlockName
from kv_transfer.errors import TransferError
from protos import events_pb2 as pb
from protos.limits import PART_BYTES

# An event has two names of 16 bytes at most, a group, and their tags and lengths.
_EVENT_BYTES = 64
MAX_BATCH_EVENTS = PART_BYTES // _EVENT_BYTES
# Of a part of a snapshot: the event loop is kept for some milliseconds.
PART_EVENTS = 4096


def fits(batch: EventBatch) -> bool:
    """Batches are not split; a snapshot is told instead of one that is too large."""
    return len(batch.events) <= MAX_BATCH_EVENTS


def encode_batch(batch: EventBatch) -> pb.CacheBatch:
    return pb.CacheBatch(
        incarnation=batch.incarnation,
        number=batch.number,
        events=[_encode_event(event) for event in batch.events],
        digests=batch.digests,
    )


def _encode_event(event: KvEvent) -> pb.CacheEvent:
    match event:
        case Stored():
            return pb.CacheEvent(stored=_encode_stored(event))
        case Removed(name, group):
            return pb.CacheEvent(removed=pb.RemovedBlob(name=name, group=group))
        case Cleared():
            return pb.CacheEvent(cleared=pb.Cleared())
        case _:
            assert_never(event)


def _encode_stored(stored: Stored) -> pb.StoredBlob:
    return pb.StoredBlob(name=stored.name, parent=stored.parent or b"", group=stored.group)


def encode_snapshot(
    snapshot: Snapshot, part_events: int = PART_EVENTS
) -> Iterator[pb.CacheSnapshot]:
    """In order; an empty one is one part."""
    for start in range(0, max(1, len(snapshot.stored)), part_events):
        part: Sequence[Stored] = snapshot.stored[start : start + part_events]
        yield pb.CacheSnapshot(
            incarnation=snapshot.incarnation,
            number=snapshot.number,
            stored=[_encode_stored(stored) for stored in part],
            digests=snapshot.digests,
            complete=start + part_events >= len(snapshot.stored),
        )


def decode_batch(message: pb.CacheBatch) -> EventBatch:
    """TransferError for what is no batch; so below."""
    events = tuple(_decode_event(event) for event in message.events)
    return EventBatch(message.incarnation, message.number, events, tuple(message.digests))


def decode_part(message: pb.CacheSnapshot) -> Snapshot:
    """With what this part has of it."""
    stored = tuple([decode_stored(one) for one in message.stored])
    return Snapshot(message.incarnation, message.number, stored, tuple(message.digests))


def _decode_event(message: pb.CacheEvent) -> KvEvent:
    match message.WhichOneof("kind"):
        case "stored":
            return decode_stored(message.stored)
        case "removed":
            removed = message.removed
            _check_tier(removed.tier)
            return Removed(_name(removed.name), removed.group)
        case "cleared":
            return Cleared()
        case _:
            raise TransferError("a cache event of an unknown kind", retryable=False)


def decode_stored(message: pb.StoredBlob) -> Stored:
    _check_tier(message.tier)
    parent = _name(message.parent) if message.parent else None
    return Stored(_name(message.name), parent, message.group)


def _check_tier(number: int) -> None:
    if number:
        raise TransferError(f"a blob in tier {number}, only 0 is known", retryable=False)


def _name(name: bytes) -> BlockName:
    if len(name) != NAME_BYTES:
        raise TransferError(f"a block name of {len(name)} bytes", retryable=False)
    return BlockName(name)
