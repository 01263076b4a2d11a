"""Transport security of the port: the files, and their checks at the start."""

from __future__ import annotations

import dataclasses
import ssl
from pathlib import Path

import grpc

from k3jax.config import ConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files.

    Attributes:
      cert, key: chain and private key of the server.
      client_ca: clients have to show a certificate that one of these signed; None asks for none.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None


def find_tls(cert: Path | None, key: Path | None, client_ca: Path | None) -> TlsFiles | None:
    """Put the options together and check the files; None without any.

    Raises:
      ConfigError: one is missing, or cannot be used.
    """
    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        missing = "--tls-cert" if cert is None else "--tls-key"
        raise ConfigError(f"{missing} is missing: expected certificate and key together")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"--tls-cert, --tls-key cannot be used: got {cert}, {key}: {reason}; "
            "expected a PEM certificate chain and its unencrypted key"
        ) from error
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(
                f"--tls-client-ca cannot be used: got {client_ca}: {reason}; "
                "expected PEM certificates"
            ) from error
    return TlsFiles(cert=cert, key=key, client_ca=client_ca)


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """What a port needs."""
    ca = files.client_ca.read_bytes() if files.client_ca else None
    return grpc.ssl_server_credentials(
        [(files.key.read_bytes(), files.cert.read_bytes())],
        root_certificates=ca,
        require_client_auth=ca is not None,
    )
