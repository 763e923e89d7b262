"""What a peer names as sources is input like any other."""

import pytest

from engine.errors import RequestError
from prefill_worker.prefixes import MAX_SOURCES, check_sources
from protos.handoff_pb2 import PrefixSource


@pytest.mark.parametrize(
    "addresses",
    [["nowhere"], [""], ["a:1", "b:99999"], ["unix:/tmp/x"], ["a:1"] * (MAX_SOURCES + 1)],
)
def test_what_names_no_workers_is_refused(addresses: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        check_sources([PrefixSource(address=address) for address in addresses])
    assert caught.value.field == "sources"


def test_workers_are_named_by_host_and_port() -> None:
    check_sources([])
    check_sources([PrefixSource(address=text, num_tokens=2**32 - 1) for text in ("a:1", "[::1]:2")])
