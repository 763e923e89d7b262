"""A port that is claimed: told when taken, in nobody's way when not."""

import random
import socket
from pathlib import Path

import pytest

from protos.address import Address
from protos.errors import PlaneError
from protos.port import claimed, reserved, reserved_port, reserved_range
from protos.rpc import Plane
from protos.secret import Secret
from tests.ports import free_port as unasked_port

PLANE = Plane(Secret(b"sixteen or more characters"))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "::1", "::"])
async def test_a_claim_keeps_callers_away_and_lets_a_server_listen(host: str) -> None:
    server = PLANE.server()
    with reserved_port(host) as port, claimed(address := Address(host, port), "listen"):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1" if host != "::1" else host, address.port))
        assert PLANE.listen(server, str(address)) == str(address)
        taken = pytest.raises(PlaneError, match=r"listen: .* cannot be listened on: Address al")
        with taken, claimed(address, "listen"):
            pass
    await server.stop(None)


async def test_what_is_no_address_here() -> None:
    for host in ("192.0.2.1", "nowhere.invalid"):
        refused = pytest.raises(PlaneError, match=f"data_port: {host}:80")
        with refused, claimed(Address(host, 80), "data_port"):
            pass


def test_a_free_port_is_none_that_the_system_gives_out_by_itself() -> None:
    least = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    port = unasked_port()
    assert port < least
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
    with pytest.raises(PlaneError, match="port: "):
        unasked_port("no.such.host.invalid")


def test_a_port_is_reserved_for_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever chance says to two that ask before either listens."""
    host = "127.0.0.1"
    with reserved_port(host) as reserved:
        another = unasked_port(host)
        chosen = iter([reserved, another])
        monkeypatch.setattr(random, "choice", lambda ports: next(chosen))
        assert unasked_port(host) == another
    chosen = iter([reserved])
    assert unasked_port(host) == reserved


def test_a_host_with_a_long_name_has_ports_of_its_own() -> None:
    host = f"{'pod' * 20}.{'name' * 15}.svc.cluster.local"
    taken = pytest.raises(PlaneError, match=f"port: {host}:80 is about to be listened on")
    first, other = reserved(Address(host, 80), "port"), reserved(Address(host, 81), "port")
    with first, other, taken, reserved(Address(host, 80), "port"):
        pass


def test_ranges_have_no_port_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protos.port._RANGES", range(10000, 10050))
    with reserved_range(20) as one, reserved_range(20) as other:
        assert len(one) == len(other) == 20
        assert not set(one) & set(other)
        with pytest.raises(PlaneError, match="10000 to 10050 are spoken for"):
            reserved_range(20).__enter__()
    with reserved_range(20) as again:
        assert again in (one, other)
