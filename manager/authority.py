"""The manager's own certificate authority, and its server certificate, which is renewed while it runs.

Agents and command lines get `<home>/ca.pem`; `<home>/ca.key` signs; the server certificate and its key are in
`<home>/tls.pem`. Both keys have mode 0600. A VM that trusts this authority trusts no other.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from .config import write_private
from .home import CA_FILE, ConfigError

log = logging.getLogger("makara.manager")

_AUTHORITY_LIFE = timedelta(days=20 * 365)
_LIFE = timedelta(days=90)
_RENEWED_BEFORE_END = timedelta(days=60)
_LOOK_S = 3600.0
_CLOCK_ERROR = timedelta(days=1)  # allowed for the clock of a machine that has just booted


class Authority:
    """The authority of a home and its certificate. Raises `ConfigError` if its files cannot be used.

    `wall` gives Unix seconds.
    """

    def __init__(self, home: Path, names: Iterable[str], wall: Callable[[], float] = time.time) -> None:
        """`names`: host names and addresses by which the manager is reached."""
        self._file = home / "tls.pem"
        self._names = sorted(set(names))
        self._wall = wall
        self._key, self._certificate = _authority(home, self._now())
        self.certificate = _pem(self._certificate)
        """The authority's certificate, which clients are to trust, as PEM."""
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.renew()

    def renew(self) -> None:
        """Use a new certificate for connections that begin from now on."""
        key = ec.generate_private_key(ec.SECP256R1())
        ends = min(self._now() + _LIFE, self._certificate.not_valid_after_utc)
        certificate = (
            _builder(self._certificate.subject, key.public_key(), self._key.public_key())
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Makara manager")]))
            # Earlier than now, since this machine's clock may be ahead of others'.
            .not_valid_before(self._certificate.not_valid_before_utc)
            .not_valid_after(ends)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName(map(_general_name, self._names)), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        write_private(self._file, (_pem(certificate) + _key_pem(key)).encode())
        self.context.load_cert_chain(self._file)
        self._ends = ends

    def offered(self, *_: object) -> ssl.SSLContext:
        """The TLS context of the server; always the same object."""
        return self.context

    async def keep_renewed(self) -> None:
        """Renew the certificate when due, until cancelled. If that fails (a full disk), try again later."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                self.renew_if_due()
            except Exception:
                log.exception("the certificate, which ends on %s, cannot be renewed now", self._ends.date())

    def renew_if_due(self) -> bool:
        """Renew the certificate if it is due; return whether it was."""
        due = self._ends - self._now() < _RENEWED_BEFORE_END
        if due:
            self.renew()
            log.info("the manager's certificate is renewed until %s", self._ends.date())
        return due

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._wall(), UTC)


def names_of(host: str, public_host: str | None = None) -> set[str]:
    """The names and addresses of a manager that listens on `host`; all of this machine's if it listens on all
    interfaces."""
    names = {"localhost", "127.0.0.1", "::1", host.strip("[]")}
    if public_host is not None:
        names.add(public_host)
    if is_wildcard(host):
        names |= {socket.gethostname(), socket.getfqdn()}
        for addresses in psutil.net_if_addrs().values():
            names |= {a.address.partition("%")[0] for a in addresses if a.family in _INTERNET}
    return names


def is_wildcard(host: str) -> bool:
    """Whether `host` stands for every address of this machine."""
    return host.strip("[]") in ("", "0.0.0.0", "::")


_INTERNET = (socket.AF_INET, socket.AF_INET6)


def _authority(home: Path, now: datetime) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """The key and certificate of this home's authority, created at the first call."""
    file, key_file = home / CA_FILE, home / "ca.key"
    if not key_file.exists():
        _make_authority(file, key_file, now)
    try:
        key = serialization.load_pem_private_key(key_file.read_bytes(), None)
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}, {key_file}: cannot be read: {error}; {_ANEW}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise ConfigError(f"{file}: {key_file} is not its key; {_ANEW}")
    if certificate.not_valid_after_utc - now < _LIFE:
        raise ConfigError(f"{file}: it ends on {certificate.not_valid_after_utc.date()}; {_ANEW}")
    return key, certificate


_ANEW = "remove both for new ones, which VMs and users of before do not know"


def _make_authority(file: Path, key_file: Path, now: datetime) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Makara manager's authority")])
    certificate = (
        _builder(name, key.public_key(), key.public_key())
        .subject_name(name)
        .not_valid_before(now - _CLOCK_ERROR)
        .not_valid_after(now + _AUTHORITY_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_SIGNS, critical=True)
        .sign(key, hashes.SHA256())
    )
    write_private(file, _pem(certificate).encode())
    write_private(key_file, _key_pem(key).encode())


_SIGNS = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


def _builder(
    issuer: x509.Name, key: ec.EllipticCurvePublicKey, authority: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority), critical=False)
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, form, serialization.NoEncryption()).decode()
