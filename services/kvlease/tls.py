"""Mutual TLS between all parts of a deployment: every server asks for a certificate of
one CA, and every client shows its own and looks for the server's name.

Files are checked before they are used, and a connection that fails is explained
(:func:`explain`): gRPC itself reports a wrong file, or no file, as "socket closed".
"""

from __future__ import annotations

import asyncio
import datetime
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import structlog
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from kvlease.config import ConfigError, Settings

log = structlog.get_logger("kvlease.tls")

_EXPLAIN_TIMEOUT_S = 2.0

# A client's preface and an empty SETTINGS frame (RFC 9113, 3.4): any HTTP/2 server answers.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@dataclass(frozen=True)
class Tls:
    """PEM files: the CA that everybody's certificate is signed by, and this process's own
    certificate and key, with which it is a server and a client."""

    ca: str
    cert: str
    key: str
    server_name: str = ""
    """Looked for in servers' certificates; empty: the host that is connected to."""

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a gRPC server that takes only clients with a certificate of the CA. Files that
        have changed are used from the next connection on. Raises :class:`ConfigError`."""
        current = self._read()

        def changed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal current
            try:
                found = self._read()
            except ConfigError as error:
                # Perhaps only one of the files has been replaced yet.
                log.warning("the earlier certificate stays in use", error=str(error))
                return None
            if found == current:
                return None
            current = found
            log.info("certificate changed", tls_cert=self.cert)
            return _configuration(*found)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(*current),
            changed,  # type: ignore[arg-type]  # None means no change
            require_client_authentication=True,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a gRPC client. Raises :class:`ConfigError`."""
        ca, cert, key = self._read()
        return grpc.ssl_channel_credentials(ca, key, cert)

    def _read(self) -> tuple[bytes, bytes, bytes]:
        ca = read_ca("tls_ca", self.ca, "that signed the certificates of all parts")
        return (ca, *read_pair("tls", self.cert, self.key))


def of(settings: Settings) -> Tls | None:
    """None where ``tls_ca`` is empty: plaintext. Raises :class:`ConfigError` for files that
    cannot be used."""
    if not settings.tls_ca:
        return None
    found = Tls(settings.tls_ca, settings.tls_cert, settings.tls_key, settings.tls_server_name)
    found.channel_credentials()
    return found


def http_context(settings: Settings) -> ssl.SSLContext | None:
    """For the router's HTTP; None: plaintext. Files that have changed are used from the
    next connection on. Raises :class:`ConfigError`."""
    cert, key = settings.router_tls_cert, settings.router_tls_key
    if not cert:
        return None
    current = read_pair("router_tls", cert, key)

    def new() -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(cert, key)
        return context

    latest = new()

    def greeted(connection: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
        nonlocal current, latest
        try:
            found = read_pair("router_tls", cert, key)
            if found != current:
                current, latest = found, new()
                log.info("certificate changed", router_tls_cert=cert)
        except (ConfigError, ssl.SSLError, OSError) as error:
            log.warning("the earlier certificate stays in use", error=str(error))
        connection.context = latest

    context = new()
    context.sni_callback = greeted  # called for every connection, named or not
    return context


def read_ca(name: str, path: str, which: str) -> bytes:
    """The content of a file with CA certificates; ``name`` is its setting. Raises
    :class:`ConfigError`."""
    content = _read(name, path)
    try:
        x509.load_pem_x509_certificates(content)
    except ValueError:
        raise ConfigError(f"{name}={path} holds no PEM certificate: name the CA {which}") from None
    return content


def read_pair(prefix: str, cert: str, key: str) -> tuple[bytes, bytes]:
    """The content of the files in the settings ``<prefix>_cert`` and ``<prefix>_key``: a
    certificate (others may follow, up to the CA) that has not expired, and its key.
    Raises :class:`ConfigError`."""
    cert_pem, key_pem = _read(f"{prefix}_cert", cert), _read(f"{prefix}_key", key)
    try:
        certificate = x509.load_pem_x509_certificates(cert_pem)[0]
        private = serialization.load_pem_private_key(key_pem, password=None)
        fit = certificate.public_key() == private.public_key()
    except (ValueError, TypeError):  # TypeError: the key is encrypted
        fit = False
    if not fit:
        raise ConfigError(
            f"{prefix}_cert={cert} and {prefix}_key={key} are not a PEM certificate and its "
            "unencrypted private key: correct one of them"
        )
    ends = certificate.not_valid_after_utc
    if ends < datetime.datetime.now(datetime.UTC):
        raise ConfigError(f"{prefix}_cert={cert} has expired on {ends:%Y-%m-%d}: make a new one")
    return cert_pem, key_pem


def explain(endpoints: str, tls: Tls | None) -> str:
    """Why no connection to one of ``endpoints`` (``host:port,...``) comes about, as a
    sentence, if TLS is the reason; else empty. Takes up to 2 s for each."""
    for endpoint in filter(None, map(str.strip, endpoints.split(","))):
        why = _without_tls(endpoint) if tls is None else _with_tls(endpoint, tls)
        if why:
            return why
    return ""


async def watch(channel: grpc.aio.Channel, endpoints: str, tls: Tls | None) -> None:
    """Logs, until cancelled, if TLS keeps ``channel`` from connecting: once an outage."""
    ready, failed = grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE
    while True:
        await _until(channel, failed)
        why = await asyncio.to_thread(explain, endpoints, tls)
        if why:
            log.error("no connection", reason=why)
        await _until(channel, ready)


async def _until(channel: grpc.aio.Channel, wanted: grpc.ChannelConnectivity) -> None:
    while (state := channel.get_state()) is not wanted:
        await channel.wait_for_state_change(state)


def _without_tls(endpoint: str) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with _connect(endpoint) as plain, context.wrap_socket(plain):
            return (
                f"{endpoint} takes TLS only, with a client certificate: set tls_ca, tls_cert "
                "and tls_key"
            )
    except OSError:  # ssl.SSLError is one
        return ""


def _with_tls(endpoint: str, tls: Tls) -> str:
    name = tls.server_name or endpoint.rpartition(":")[0].strip("[]")
    context = ssl.create_default_context(cafile=tls.ca)
    context.load_cert_chain(tls.cert, tls.key)
    context.set_alpn_protocols(["h2"])
    try:
        plain = _connect(endpoint)
    except OSError:
        return ""
    greeted = False
    with plain:
        try:
            with context.wrap_socket(plain, server_hostname=name) as secure:
                greeted = True
                # Since TLS 1.3 a server judges the client's certificate after the handshake.
                secure.sendall(_HELLO)
                if secure.recv(1):
                    return ""
        except ssl.SSLCertVerificationError as error:
            if error.verify_code in _WRONG_NAME:
                return (
                    f"the certificate of {endpoint} is not for {name!r}: make one that has this "
                    "name, or set tls_server_name to one that it has"
                )
            return (
                f"the certificate of {endpoint} does not pass ({error.verify_message}): tls_ca="
                f"{tls.ca} must be the CA that signed it"
            )
        except TimeoutError:
            return ""
        except OSError:
            pass
    if greeted:
        return (
            f"{endpoint} does not accept this client's certificate: tls_cert={tls.cert} must be "
            "signed by the server's tls_ca"
        )
    return f"{endpoint} does not speak TLS: set its tls_ca, tls_cert and tls_key, or none here"


# X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH (openssl/x509_vfy.h)
_WRONG_NAME = (62, 64)


def _connect(endpoint: str) -> socket.socket:
    host, _, port = endpoint.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), _EXPLAIN_TIMEOUT_S)


def _configuration(ca: bytes, cert: bytes, key: bytes) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(key, cert)], ca)


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}={path} cannot be read: {error.strerror}") from None
