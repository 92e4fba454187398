"""Certificates of every kind: of a fleet's authority, of another one, expired, of each role."""

from __future__ import annotations

from base64 import b32encode
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import NameOID

from kakeya.wire.security import CertRole, TlsMaterial
from kakeya.wire.tls import (
    AUTHORITY_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    any_member,
    fleet_of,
)

YEAR = timedelta(days=365)
Key = ec.EllipticCurvePrivateKey


def spki(key: Key) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def node_id_of(key: Key) -> str:
    return b32encode(sha256(spki(key)).digest()).decode().rstrip("=").lower()


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def caller_of(certificate: bytes) -> tuple[str, CertRole]:
    names = (
        x509.load_pem_x509_certificate(certificate)
        .extensions.get_extension_for_class(x509.SubjectAlternativeName)
        .value
    )
    uri = names.get_values_for_type(x509.UniformResourceIdentifier)[0]
    return names.get_values_for_type(x509.DNSName)[0], CertRole(uri.rpartition(":")[2])


def write(folder: Path, material: TlsMaterial) -> Path:
    """The files of an identity, each put in place at once."""
    folder.mkdir(exist_ok=True)
    for name, text in (
        (KEY_FILE, material.key),
        (CERTIFICATE_FILE, material.certificate),
        (AUTHORITY_FILE, material.authority),
    ):
        fresh = folder / f"{name}.new"
        fresh.write_bytes(text)
        fresh.replace(folder / name)
    return folder


class Authority:
    """A fleet's authority; also what nodes know of callers (`CallerTrust`)."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = _name("a fleet")
        self.revoked: set[str] = set()
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(name)
        self._certificate = (
            self._valid(builder.public_key(self._key.public_key()))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.pem = self._certificate.public_bytes(Encoding.PEM)
        self.fleet = fleet_of(self.pem)

    def issue(
        self,
        role: CertRole = CertRole.MEMBER,
        *,
        key: Key | None = None,
        age: timedelta = timedelta(days=2),
    ) -> tuple[str, TlsMaterial]:
        """A node id and what it shows; `age` beyond a year = expired."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        node_id = node_id_of(key)
        names: list[x509.GeneralName] = [
            x509.DNSName(node_id),
            x509.UniformResourceIdentifier(f"kakeya:role:{role}"),
        ]
        if role is CertRole.MEMBER:
            names.append(x509.DNSName(any_member(self.fleet)))
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(node_id[:64]))
            .issuer_name(self._certificate.subject)
        )
        certificate = (
            self._valid(builder.public_key(key.public_key()), age)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        return node_id, TlsMaterial(
            key=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
            certificate=certificate.public_bytes(Encoding.PEM),
            authority=self.pem,
        )

    def caller_of(self, certificate: bytes) -> tuple[str, CertRole] | None:
        return caller_of(certificate)

    def is_revoked(self, node_id: str) -> bool:
        return node_id in self.revoked

    @staticmethod
    def _valid(
        builder: x509.CertificateBuilder, age: timedelta = timedelta(days=2)
    ) -> x509.CertificateBuilder:
        start = datetime.now(UTC) - age
        return (
            builder.serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(start + YEAR)
        )
