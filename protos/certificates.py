"""Whether files in PEM are what TLS takes them for, before anything connects by them: gRPC would
fail with each connection, and does not say why."""

from __future__ import annotations

import ssl

from protos.errors import PlaneError


def check_authority(path: str) -> None:
    _check_certificates("tls_authority", path)


def check_pair(certificate: str, key: str) -> None:
    """PlaneError also for a key with a passphrase, for which nobody is there to be asked."""
    _check_certificates("tls_certificate", certificate)

    def passphrase() -> str:
        raise PlaneError("tls_key", f"{key} is encrypted; a key without a passphrase is needed")

    try:
        _context().load_cert_chain(certificate, key, passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            message = f"{key} is not the key of the first certificate in {certificate}"
        else:
            message = f"{key} cannot be used with {certificate}: {error.reason or error}"
        raise PlaneError("tls_key", message) from error


def _check_certificates(field: str, path: str) -> None:
    try:
        _context().load_verify_locations(path)
    except ssl.SSLError as error:
        raise PlaneError(field, f"{path} has no certificate: {error.reason or error}") from error


def _context() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
