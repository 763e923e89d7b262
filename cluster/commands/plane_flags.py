"""Flags for connections between workers and to them."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

from engine.errors import ConfigError
from protos.errors import PlaneError
from protos.rpc import FILES, Plane, RpcConfig
from protos.secret import VARIABLE

_PREFIX = "plane_"
_HELP = {
    "secret_file": f"the cluster's secret, for its owner's eyes only; or the variable {VARIABLE}",
    "tls_certificate": "PEM, with its key: connections are encrypted",
    "tls_key": "PEM",
    "tls_authority": "PEM: peers must show a certificate that it signed",
    "tls_server_name": "in peers' certificates, if not their address",
}


def add_plane_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("connections to workers")
    for knob in fields(RpcConfig):
        flag = "--" + knob.name.replace("_", "-")
        group.add_argument(flag, dest=_PREFIX + knob.name, metavar="TEXT", help=_HELP[knob.name])


def given_plane_flags(arguments: argparse.Namespace) -> dict[str, str]:
    """Files by whole paths: other processes read them too, in folders of their own."""
    given: dict[str, str] = {}
    for flag, value in vars(arguments).items():
        name = flag.removeprefix(_PREFIX)
        if flag != name and value is not None:
            given[name] = str(Path(value).absolute()) if name in FILES else value
    return given


def load_plane(config: RpcConfig) -> Plane:
    with plane_errors_as_config_errors():
        return Plane.load(config)


@contextmanager
def plane_errors_as_config_errors() -> Iterator[None]:
    """By the flag's own name; what stands in a file has a place (`worker_config.in_rpc`)."""
    try:
        yield
    except PlaneError as error:
        raise ConfigError(error.field, error.message) from error
