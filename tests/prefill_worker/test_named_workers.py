"""What a peer names as sources is input like any other."""

import pytest

from engine.errors import RequestError
from prefill_worker.named_workers import (
    MAX_NAMED,
    PrefixSource,
    decode_sources,
    encode_sources,
)
from protos import handoff_pb2 as pb


@pytest.mark.parametrize(
    "addresses",
    [["nowhere"], [""], ["a:1", "b:99999"], ["unix:/tmp/x"], ["a:1"] * (MAX_NAMED + 1)],
)
def test_what_names_no_workers_is_refused(addresses: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        decode_sources([pb.PrefixSource(address=address) for address in addresses])
    assert caught.value.field == "sources"


def test_workers_are_named_by_host_and_port() -> None:
    sources = (PrefixSource("a:1", 2**64 - 1, 2**32 - 1), PrefixSource("[::1]:2", 0, 0))
    assert decode_sources(encode_sources(sources)) == sources
    assert decode_sources([]) == ()
