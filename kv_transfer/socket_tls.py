"""TLS for transfer sockets, from the same files as the worker plane's."""

import ssl
from dataclasses import dataclass
from typing import Self

from kv_transfer.errors import ConnectorUnavailable


@dataclass(frozen=True)
class SocketTls:
    """`server_name`: what peers' certificates are made out to, if not to their address."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    server_name: str | None = None

    @classmethod
    def load(
        cls, certificate: str, key: str, authority: str | None, server_name: str | None = None
    ) -> Self:
        """With an authority, both ends show a certificate that it signed, and nobody else did:
        without one, servers' are those that the machine trusts."""
        try:
            server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority)
            client = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=authority)
            for context in (server, client):
                context.load_cert_chain(certificate, key)
        except OSError as e:  # an SSLError is one
            raise ConnectorUnavailable(f"TLS: {e}") from e
        if authority:
            server.verify_mode = ssl.CERT_REQUIRED
        return cls(server, client, server_name)
