"""What `kvrelay serve` finds on a Ray cluster of others', and leaves as it is."""

from __future__ import annotations

import argparse
import errno
from typing import Any

import pytest
from ray.serve._private.haproxy import HAProxyConfig
from ray.serve.config import HTTPOptions

from cluster.cluster_args import ClusterArgs
from cluster.commands.local import kept
from cluster.commands.serve_file import ServeFile
from cluster.commands.serve_front import WishedFront
from cluster.deployment import check_room
from cluster.front_address import FrontAddress, listen
from cluster.open_files import ENABLED
from engine.errors import ConfigError

OTHER = {"status": "RUNNING", "route_prefix": "/other", "source": "declarative"}


def details(**applications: dict[str, Any]) -> dict[str, Any]:
    return {"applications": applications}


def args(**more: Any) -> ClusterArgs:
    return ClusterArgs.checked({"model": "bundled", **more})


def test_there_is_room_beside_others() -> None:
    check_room(args(), {})
    check_room(args(), details(other=OTHER))
    check_room(args(decode={"replicas": "1-2"}), details(other={**OTHER, "source": "imperative"}))


@pytest.mark.parametrize("status", ["RUNNING", "DEPLOY_FAILED", "DELETING"])
def test_an_application_of_ours_is_left_alone(status: str) -> None:
    with pytest.raises(ConfigError, match=rf"RAY_ADDRESS: .* already \({status.lower()}\)"):
        check_room(args(), details(kvrelay={**OTHER, "status": status}))


def test_another_s_route_is_left_alone() -> None:
    with pytest.raises(ConfigError, match="RAY_ADDRESS: the application other has the route /"):
        check_room(args(), details(other={**OTHER, "route_prefix": "/"}))


def test_ranges_would_delete_what_files_have_deployed() -> None:
    with pytest.raises(ConfigError, match="replicas: a range .* have deployed there: other;"):
        check_room(args(decode={"replicas": "1-2"}), details(other=OTHER))


THERE = FrontAddress("0.0.0.0", 8100)


@pytest.mark.parametrize(
    ("wished", "front"),
    [
        (WishedFront(None, None, None), THERE),
        (WishedFront("0.0.0.0", 8100, None), THERE),
        (WishedFront(None, 0, None), THERE._replace(grpc_port=9100)),
        (WishedFront(None, None, 0), THERE._replace(grpc_port=9100)),
        (WishedFront(None, None, 9100), THERE._replace(grpc_port=9100)),
    ],
)
def test_a_front_that_is_there_is_taken_as_it_is(wished: WishedFront, front: FrontAddress) -> None:
    assert wished.there(front) == front


@pytest.mark.parametrize(
    ("wished", "front", "reason"),
    [
        (WishedFront("127.0.0.1", None, None), THERE, "host: 127.0.0.1, but .* with 0.0.0.0"),
        (WishedFront(None, 8000, None), THERE, "port: 8000, but .* with 8100"),
        (WishedFront(None, None, 0), THERE, "grpc_port: 0, but .* with none"),
        (WishedFront(None, None, 9000), THERE._replace(grpc_port=9100), "grpc_port: .* with 9100"),
        (WishedFront(None, None, None), None, "RAY_ADDRESS: Serve runs there without a front"),
    ],
)
def test_a_front_that_is_there_cannot_be_another(
    wished: WishedFront, front: FrontAddress | None, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        wished.there(front)


def test_without_wishes_it_is_this_machine_s_loopback() -> None:
    with WishedFront(None, 0, 0).here() as front:
        assert front.host == "127.0.0.1"
        assert front.port != 0
        assert front.grpc_port not in (None, 0, front.port)


@pytest.mark.parametrize("host", ["127.0.0.2", "::1"])
def test_a_front_is_nowhere_where_it_would_not_find_its_ingresses(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wished = WishedFront(host, None, None)
    with pytest.raises(ConfigError, match=f"host: {host}, .* may be 0.0.0.0 or ::, "):
        wished.check_reached()
    monkeypatch.setenv(ENABLED, "0")  # Serve's Python proxy does
    wished.check_reached()


@pytest.mark.parametrize("host", [None, "127.0.0.1", "localhost", "0.0.0.0", "::"])
def test_a_front_finds_its_ingresses_elsewhere(host: str | None) -> None:
    WishedFront(host, None, None).check_reached()


def test_nobody_listens_on_ipv6_where_the_kernel_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr("cluster.front_address.socket.socket", refuse)
    with pytest.raises(ConfigError, match="host: :: is no address here: Address family not"):
        listen("::", 8100)


def test_every_address_is_every_address_to_haproxy_as_well() -> None:
    """Which Serve has listen on IPv4 alone where it is told `::`."""
    said = argparse.Namespace(host="::", port=8100, grpc_port=None)
    host = WishedFront.of(said, ServeFile({})).host
    assert host is not None
    assert HAProxyConfig(http_options=HTTPOptions(host=host)).frontend_host == host
    assert FrontAddress(host, 8100).url == "http://[::1]:8100/v1"


def test_two_fronts_that_start_at_once_have_no_port_in_common() -> None:
    """Neither listens yet, and once they did each would get its part of the other's callers."""
    with WishedFront(None, 0, 0).here() as first:
        same_http = WishedFront(None, first.port, 0), "port", first.port
        same_grpc = WishedFront(None, 0, first.grpc_port), "grpc_port", first.grpc_port
        for other, name, taken in (same_http, same_grpc):
            refused = pytest.raises(
                ConfigError, match=rf"^{name}: 127.0.0.1:{taken} is about to be"
            )
            with refused, other.here():
                pass
        with pytest.raises(ConfigError, match="is about to be"), kept(first.host, first.port):
            pass  # as `kvrelay local`
    with WishedFront(None, first.port, first.grpc_port).here() as again:
        assert again == first
