import pytest

from protos.address import Address
from protos.errors import PlaneError


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("127.0.0.1:80", "127.0.0.1", 80, True),
        ("127.1.2.3:0", "127.1.2.3", 0, True),
        ("[::1]:65535", "::1", 65535, True),
        ("localhost:1", "localhost", 1, True),
        ("10.0.0.7:50051", "10.0.0.7", 50051, False),
        ("0.0.0.0:1", "0.0.0.0", 1, False),
        ("[::]:1", "::", 1, False),
        ("localhost.evil.example:1", "localhost.evil.example", 1, False),
        ("gpu-3.rack_2:9", "gpu-3.rack_2", 9, False),
    ],
)
def test_addresses_are_taken_apart(text: str, host: str, port: int, loopback: bool) -> None:
    address = Address.parse(text)
    assert (address.host, address.port, address.is_loopback) == (host, port, loopback)
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":80",
        "host",
        "host:",
        "host:-1",
        "host:65536",
        "host:8o",
        "host:٣",
        "host:000080",
        "::1:80",
        "[::1:80",
        "[host]:80",
        "[fe80::1%eth0]:80",
        "1.2.3:80",
        "300.1.1.1:80",
        "unix:/tmp/socket",
        "dns:///host:80",
        "a host:80",
        "-host:80",
        "host\n:80",
        "x" * 300 + ":80",
    ],
)
def test_what_is_no_address_is_refused_by_the_name_of_its_field(text: str) -> None:
    with pytest.raises(PlaneError, match=r"\Aprefill_workers: "):
        Address.parse(text, "prefill_workers")
