"""A certificate authority in a directory: ``ca.pem`` and ``ca.key``, and a certificate
with its key (``NAME.pem``, ``NAME.key``) for each name it has issued one for.

Keys are ECDSA over P-256, mode 0600. What is there is never overwritten: to replace a
certificate, remove its two files and issue it again.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvlease.config import ConfigError

CA_DAYS = 3650

LEAF_DAYS = 825
"""The longest life that all TLS clients accept of a server's certificate (Apple's limit)."""

_BACKDATED = datetime.timedelta(hours=1)
"""Clocks of other hosts may be behind."""


@dataclass(frozen=True)
class Pair:
    """PEM files of a certificate and its key."""

    cert: Path
    key: Path
    is_new: bool = True
    """False: they were there."""


class Authority:
    """The authority of a directory; it is made if there is none."""

    def __init__(self, directory: Path, *, common_name: str = "kvlease CA") -> None:
        """Raises :class:`ConfigError` for files that are no authority, OSError for a
        directory that cannot be written."""
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.pair = Pair(directory / "ca.pem", directory / "ca.key", self._is_new("ca"))
        if self.pair.is_new:
            self._key = ec.generate_private_key(ec.SECP256R1())
            self._cert = _sign_ca(self._key, common_name)
            _write(self.pair, self._cert, self._key)
        else:
            self._cert, self._key = _load(self.pair)

    @property
    def cert(self) -> Path:
        """The CA's own certificate."""
        return self.pair.cert

    def issue(self, name: str, hosts: Sequence[str], *, days: int = LEAF_DAYS) -> Pair:
        """A certificate for a server at ``hosts`` (DNS names and IP addresses), and for a
        client. The one that is there if it is for the same hosts and still valid.

        Raises :class:`ConfigError` for what cannot be a name, and where there is another
        certificate of that name.
        """
        if not re.fullmatch(r"[\w*][\w.:*-]*", name, re.ASCII) or name == "ca":
            raise ConfigError(
                f"{name!r} cannot be the name of a certificate's file: choose another"
            )
        alternatives = [_general_name(host) for host in dict.fromkeys(hosts)]
        cert, key = self.directory / f"{name}.pem", self.directory / f"{name}.key"
        if not self._is_new(name):
            self._check_same(cert, alternatives)
            return Pair(cert, key, is_new=False)
        pair, private = Pair(cert, key), ec.generate_private_key(ec.SECP256R1())
        _write(pair, self._sign(name, alternatives, private, days), private)
        return pair

    def _is_new(self, name: str) -> bool:
        """Whether neither of its files is there."""
        there = [(self.directory / f"{name}{end}").exists() for end in (".pem", ".key")]
        if there in ([True, False], [False, True]):
            raise ConfigError(
                f"of {name}.pem and {name}.key in {self.directory} one is missing: bring it back, "
                "or remove the other to have both made"
            )
        return not any(there)

    def _check_same(self, path: Path, alternatives: list[x509.GeneralName]) -> None:
        found = _read_certificate(path)
        if not self._has_signed(found):
            problem = "is of another CA"
        elif found.not_valid_after_utc < _now():
            problem = "has expired"
        elif _alternatives_of(found) != set(alternatives):
            problem = "is for other names"
        else:
            return
        raise ConfigError(
            f"{path} {problem}, and nothing is overwritten: remove it and its key to have both "
            "made anew"
        )

    def _has_signed(self, certificate: x509.Certificate) -> bool:
        try:
            certificate.verify_directly_issued_by(self._cert)
        except (InvalidSignature, ValueError, TypeError):
            return False
        return True

    def _sign(
        self,
        name: str,
        alternatives: list[x509.GeneralName],
        key: ec.EllipticCurvePrivateKey,
        days: int,
    ) -> x509.Certificate:
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = (
            _builder(_common_name(name), self._cert.subject, key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(both), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )
        if alternatives:
            builder = builder.add_extension(
                x509.SubjectAlternativeName(alternatives), critical=False
            )
        return builder.sign(self._key, hashes.SHA256())


def _sign_ca(key: ec.EllipticCurvePrivateKey, common_name: str) -> x509.Certificate:
    name = _common_name(common_name)
    return (
        _builder(name, name, key.public_key(), CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - _BACKDATED)
        .not_valid_after(_now() + datetime.timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])  # RFC 5280's limit


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not re.fullmatch(r"(\*\.)?([\w-]{1,63}\.)*[\w-]{1,63}", host, re.ASCII):
        raise ConfigError(f"{host!r} is neither a host's name nor an IP address")
    return x509.DNSName(host)


def _alternatives_of(certificate: x509.Certificate) -> set[x509.GeneralName]:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return set()
    return set(extension.value)


def _load(pair: Pair) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    certificate = _read_certificate(pair.cert)
    try:
        key = serialization.load_pem_private_key(pair.key.read_bytes(), password=None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or (
        certificate.public_key() != key.public_key()
    ):
        raise ConfigError(
            f"{pair.cert} and {pair.key} are not a CA that `kvlease ca` has made: name another "
            "directory"
        )
    return certificate, key


def _read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError:
        raise ConfigError(
            f"{path} holds no PEM certificate: remove it, or name another directory"
        ) from None


def _write(pair: Pair, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    """The key first: a certificate without one would look like somebody else's."""
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    _create(pair.key, private, 0o600)
    _create(pair.cert, certificate.public_bytes(serialization.Encoding.PEM), 0o644)


def _create(path: Path, content: bytes, mode: int) -> None:
    """Raises FileExistsError rather than overwrite."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
