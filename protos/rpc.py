"""How workers and ingresses connect: one set of settings for every gRPC channel and server.

RpcConfig    what a user says: names of files, nothing secret
Plane        what it comes to: makes channels and servers that fit together
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from protos.address import Address
from protos.certificates import check_authority, check_pair
from protos.errors import PlaneError
from protos.limits import MAX_MESSAGE_BYTES as MAX_MESSAGE_BYTES
from protos.limits import PROTOCOL as PROTOCOL
from protos.secret import VARIABLE, Secret, SecretChannel, SecretCheck

# A dead, stopped or cut-off peer breaks a stream within 2 s. `grpc.keepalive_timeout_ms` has no
# effect in gRPC 1.85: detection took a minute, and 1.7 s with `ping_timeout_ms`.
_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.http2.max_pings_without_data", 0),
)
_SIZES = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)
_CLIENT = (
    *_KEEPALIVE,
    *_SIZES,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),  # in fact how long one attempt may take
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),  # no channel waits for another's back-off
    ("grpc.enable_http_proxy", 0),
)
_SERVER = (
    *_KEEPALIVE,
    *_SIZES,
    # By default pings of one second are answered by hanging up.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not shared
)


# Who logs it when bytes that came are no message: a server's end, and a client's.
_READERS = ("grpc._cython.cygrpc", "grpc._common")


def _without_traceback(record: logging.LogRecord) -> bool:
    """Where gRPC was when it read a peer's bytes says nothing: one line for each is enough."""
    if record.exc_info and isinstance(record.exc_info[1], DecodeError):
        record.exc_info = None
    return True


for _reader in _READERS:
    logging.getLogger(_reader).addFilter(_without_traceback)


@dataclass(frozen=True, slots=True)
class RpcConfig:
    """Files in PEM. With `tls_authority`, peers must show a certificate that it signed."""

    secret_file: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_authority: str | None = None
    tls_server_name: str | None = None  # in peers' certificates, if not their address


FILES = ("secret_file", "tls_certificate", "tls_key", "tls_authority")


@dataclass(frozen=True, slots=True)
class Tls:
    certificate: bytes | None
    key: bytes | None = field(repr=False)
    authority: bytes | None
    server_name: str | None

    @classmethod
    def load(cls, config: RpcConfig) -> Self | None:
        if (config.tls_certificate is None) != (config.tls_key is None):
            missing = "tls_key" if config.tls_key is None else "tls_certificate"
            raise PlaneError(missing, "certificate and key come together")
        files = (config.tls_certificate, config.tls_key, config.tls_authority)
        if files == (None, None, None):
            if config.tls_server_name is not None:
                raise PlaneError("tls_server_name", "needs tls_authority or tls_certificate")
            return None
        loaded = cls(
            _read("tls_certificate", config.tls_certificate),
            _read("tls_key", config.tls_key),
            _read("tls_authority", config.tls_authority),
            config.tls_server_name,
        )
        if config.tls_authority is not None:
            check_authority(config.tls_authority)
        if config.tls_certificate is not None and config.tls_key is not None:
            check_pair(config.tls_certificate, config.tls_key)
        return loaded


@dataclass(frozen=True, slots=True)
class Plane:
    """Makes the channels and servers of one process; holds nothing open itself."""

    secret: Secret | None = None
    tls: Tls | None = None

    @classmethod
    def load(cls, config: RpcConfig, environ: Mapping[str, str] = os.environ) -> Self:
        return cls(Secret.load(config.secret_file, environ), Tls.load(config))

    def channel(self, address: str) -> grpc.aio.Channel:
        """Connects with its first call. A call to a peer that is not there fails at once."""
        target = str(Address.parse(address))
        options: list[tuple[str, int | str]] = list(_CLIENT)
        if self.tls is None:
            channel = grpc.aio.insecure_channel(target, options)
        else:
            if self.tls.server_name is not None:
                options.append(("grpc.ssl_target_name_override", self.tls.server_name))
            credentials = grpc.ssl_channel_credentials(
                self.tls.authority, self.tls.key, self.tls.certificate
            )
            channel = grpc.aio.secure_channel(target, credentials, options)
        return channel if self.secret is None else SecretChannel(channel, self.secret)

    def server(self) -> grpc.aio.Server:
        """Without a port; `listen` gives it one."""
        checks = [] if self.secret is None else [SecretCheck(self.secret)]
        return grpc.aio.server(interceptors=checks, options=list(_SERVER))

    def check_listen(self, address: str, field: str = "listen") -> Address:
        """Without a secret whoever reaches the port may use the worker, so that is allowed on
        this machine's own addresses only."""
        wanted = Address.parse(address, field)
        if self.secret is None and not wanted.is_loopback:
            raise PlaneError(
                field,
                f"{wanted} is beyond this machine and there is no cluster secret;"
                f" set secret_file or {VARIABLE}",
            )
        self._server_credentials()
        return wanted

    def listen(self, server: grpc.aio.Server, address: str, field: str = "listen") -> str:
        """The address with its port, where 0 asked for any that is free."""
        wanted = self.check_listen(address, field)
        credentials = self._server_credentials()
        try:
            if credentials is None:
                port = server.add_insecure_port(str(wanted))
            else:
                port = server.add_secure_port(str(wanted), credentials)
        except RuntimeError as error:
            hint = "" if credentials is None else ", or its certificate and key do not fit"
            raise PlaneError(field, f"{wanted} cannot be listened on{hint}") from error
        return str(Address(wanted.host, port))

    def _server_credentials(self) -> grpc.ServerCredentials | None:
        if self.tls is None:
            return None
        if self.tls.key is None or self.tls.certificate is None:
            raise PlaneError("tls_certificate", "a worker needs one, with tls_key")
        return grpc.ssl_server_credentials(
            [(self.tls.key, self.tls.certificate)],
            root_certificates=self.tls.authority,
            require_client_auth=self.tls.authority is not None,
        )


def _read(name: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise PlaneError(name, f"{path} cannot be read: {error.strerror}") from error
    if b"-----BEGIN " not in content:
        raise PlaneError(name, f"{path} is no PEM file")
    return content
