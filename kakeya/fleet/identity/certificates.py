"""The fleet's certificates, their content, making and reading: the only place that knows X.509.

    authority   self-signed, CN "kakeya fleet"; the fleet's name is a hash of its public key
    leaf        CN = label
                SAN DNS:<node id>               the key's own name, which callers expect
                    DNS:member.<fleet>.kakeya   members only: expected at a new address
                    URI:kakeya:role:<role>      member, client, admin
                    DNS:<name>, IP:<address>    in a certificate for HTTPS: names of its machine
                EKU client; server only for members, so that no other holder can pose as one

Keys are P-256: gRPC's TLS refuses Ed25519 leaves. Certificates begin 48 h before they are made,
because a machine with a clock that is behind would otherwise lock itself out.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.utils import CryptographyDeprecationWarning
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kakeya.fleet.identity.hosts import general_names, hosts_of, local_hosts
from kakeya.wire.security import CertRole
from kakeya.wire.tls import any_member, fleet_name

DAY_S = 86_400.0
LEAF_LIFE_S = 365 * DAY_S
AUTHORITY_LIFE_S = 50 * 365 * DAY_S
"""Longer than machines live: to replace a fleet's authority, every node must join again."""
BACKDATED_S = 2 * DAY_S
MAX_LABEL_BYTES = 64
_HASH_BYTES = 32
_ROLE_URI = "kakeya:role:"
_UNREADABLE = (
    ValueError,
    TypeError,
    InvalidSignature,
    UnsupportedAlgorithm,
    x509.ExtensionNotFound,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
    CryptographyDeprecationWarning,  # where warnings are errors: serial numbers below 1
)
"""Errors that the readers of X.509 raise for damaged or hostile input."""
_AUTHORITY_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kakeya fleet")])

PublicKey = ec.EllipticCurvePublicKey
PrivateKey = ec.EllipticCurvePrivateKey


class Untrusted(ValueError):
    """A key, request or certificate that is damaged, or not of this fleet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CertHolder:
    """The holder that a certificate of the fleet names, and the time of its validity."""

    node_id: str
    label: str
    role: CertRole
    not_before_at: float
    not_after_at: float
    public_key: PublicKey

    def is_valid_at(self, now: float) -> bool:
        """Whether the certificate counts at a time."""
        return self.not_before_at <= now <= self.not_after_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for a certificate: a key, which signed the request, and its label."""

    node_id: str
    label: str
    public_key: PublicKey
    hosts: tuple[str, ...] = ()
    """Names and addresses of the machine, which a certificate for HTTPS carries."""


def new_key() -> PrivateKey:
    """Draw a key."""
    return ec.generate_private_key(ec.SECP256R1())


def spki_hash(key: PublicKey) -> bytes:
    """SHA-256 of the key as X.509 writes it; 32 bytes."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).digest()


def node_id_of(key: PublicKey) -> str:
    """The id that a key gives its node: 52 lower case characters."""
    return spell_id(spki_hash(key))


def spell_id(key_hash: bytes) -> str:
    """Spell a hash of 32 bytes as an id: base32, lower case, no padding."""
    return base64.b32encode(key_hash).decode("ascii").lower().rstrip("=")


def read_id(node_id: str) -> bytes:
    """Return the hash that an id spells. Raises Untrusted for a text that is no id of a key."""
    try:
        key_hash = base64.b32decode(node_id.upper() + "=" * (-len(node_id) % 8))
    except ValueError:
        key_hash = b""
    if len(key_hash) != _HASH_BYTES or spell_id(key_hash) != node_id:
        raise Untrusted(f"{node_id!r} is not the id of a key")
    return key_hash


def is_key_id(node_id: str) -> bool:
    """Whether a name is the id of a key, rather than a chosen or a random name."""
    try:
        read_id(node_id)
    except Untrusted:
        return False
    return True


def is_valid_label(label: str) -> bool:
    """1 to 64 bytes of printable text."""
    return bool(label) and label.isprintable() and len(label.encode()) <= MAX_LABEL_BYTES


def make_authority(key: PrivateKey, now: float) -> x509.Certificate:
    """Make the certificate at the root of a new fleet."""
    public = key.public_key()
    usage = _key_usage(key_cert_sign=True, crl_sign=True)
    return (
        _dated(public, now=now, life_s=AUTHORITY_LIFE_S)
        .subject_name(_AUTHORITY_NAME)
        .issuer_name(_AUTHORITY_NAME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )


def issue(
    request: Request, *, role: CertRole, authority_key: PrivateKey, now: float, life_s: float
) -> x509.Certificate:
    """Make a leaf certificate."""
    issuer = authority_key.public_key()
    fleet = fleet_name(spki_hash(issuer))
    names: list[x509.GeneralName] = [x509.DNSName(request.node_id)]
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if role is CertRole.MEMBER:
        names.append(x509.DNSName(any_member(fleet)))
        names.extend(general_names(request.hosts))
        purposes.append(ExtendedKeyUsageOID.SERVER_AUTH)
    names.append(x509.UniformResourceIdentifier(_ROLE_URI + role.value))
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer)
    return (
        _dated(request.public_key, now=now, life_s=life_s)
        .subject_name(_named(request.label))
        .issuer_name(_AUTHORITY_NAME)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(identifier, critical=False)
        .sign(authority_key, hashes.SHA256())
    )


def make_request(key: PrivateKey, label: str, hosts: Iterable[str] = ()) -> bytes:
    """Ask for a certificate, for HTTPS also with the names of its machine; PKCS#10, DER."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(_named(label))
    if names := general_names(local_hosts(hosts)):
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def read_request(der: bytes) -> Request:
    """Read a request of `make_request`. Raises Untrusted."""
    try:
        request = x509.load_der_x509_csr(der)
        key, label = _p256(request.public_key()), _label_of(request.subject)
        hosts = hosts_of(request.extensions)
        is_signed = request.is_signature_valid and _is_whole(der, request.signature)
    except _UNREADABLE as problem:
        raise Untrusted(f"the certificate request cannot be read: {problem}") from problem
    if not is_signed or not is_valid_label(label):
        raise Untrusted("the certificate request is not signed by its key, or has no label")
    return Request(node_id=node_id_of(key), label=label, public_key=key, hosts=hosts)


def read_authority(pem: bytes) -> x509.Certificate:
    """Read the certificate at a fleet's root. Raises Untrusted when it is not whole."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        _check_issuer(certificate, certificate)
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
        _p256(certificate.public_key())
    except _UNREADABLE as problem:
        raise Untrusted(f"no authority's certificate: {problem or 'bad signature'}") from problem
    if not constraints.value.ca:
        raise Untrusted("no authority's certificate: its holder may not issue any")
    return certificate


def read_leaf(pem: bytes) -> x509.Certificate:
    """Read one certificate of any issuer. Raises Untrusted."""
    try:
        return x509.load_pem_x509_certificate(pem)
    except _UNREADABLE as problem:
        raise Untrusted(f"no certificate: {problem}") from problem


def read_der(der: bytes) -> x509.Certificate:
    """Read one certificate in its binary form. Raises Untrusted."""
    try:
        return x509.load_der_x509_certificate(der)
    except _UNREADABLE as problem:
        raise Untrusted(f"no certificate: {problem}") from problem


def read_holder(certificate: x509.Certificate, authority: x509.Certificate) -> CertHolder:
    """Read a certificate's holder. Raises Untrusted unless this authority issued it by `issue`."""
    try:
        _check_issuer(certificate, authority)
        key, label = _p256(certificate.public_key()), _label_of(certificate.subject)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        role = _role_of(names.get_values_for_type(x509.UniformResourceIdentifier))
    except _UNREADABLE as problem:
        raise Untrusted(f"not a certificate of this fleet: {problem or 'bad signature'}") from None
    node_id = node_id_of(key)
    if node_id not in names.get_values_for_type(x509.DNSName):
        raise Untrusted("the certificate does not carry the name of its own key")
    return CertHolder(
        node_id=node_id,
        label=label,
        role=role,
        not_before_at=certificate.not_valid_before_utc.timestamp(),
        not_after_at=certificate.not_valid_after_utc.timestamp(),
        public_key=key,
    )


def authority_key(authority: x509.Certificate) -> PublicKey:
    """The public key of an authority's certificate, as `read_authority` returns it."""
    return _p256(authority.public_key())


def read_key(pem: bytes) -> PrivateKey:
    """Read a private key. Raises Untrusted."""
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as problem:
        raise Untrusted(f"no private key: {problem}") from problem
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise Untrusted("no private key on the curve P-256")
    return key


def is_pair(key: PrivateKey, public: PublicKey) -> bool:
    """Whether the public key verifies a signature of the private key.

    By a trial: a damaged private half may lie beside a whole public half in the same file.
    """
    proof = key.sign(b"kakeya-key-pair", ec.ECDSA(hashes.SHA256()))
    try:
        public.verify(proof, b"kakeya-key-pair", ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


def key_pem(key: PrivateKey) -> bytes:
    """Write a private key, unencrypted."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def certificate_der(certificate: x509.Certificate) -> bytes:
    """Write a certificate in its binary form."""
    return certificate.public_bytes(serialization.Encoding.DER)


def certificate_pem(certificate: x509.Certificate) -> bytes:
    """Write a certificate."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def _check_issuer(certificate: x509.Certificate, authority: x509.Certificate) -> None:
    certificate.verify_directly_issued_by(authority)
    if not _is_whole(certificate_der(certificate), certificate.signature):
        raise ValueError("its signature is damaged")


def _is_whole(der: bytes, signature: bytes) -> bool:
    """Whether a certificate ends with its signature, without unused bits: TLS is that strict."""
    return der.endswith(bytes((0x03, len(signature) + 1, 0x00)) + signature)


def _p256(key: object) -> PublicKey:
    if isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1):
        return key
    raise ValueError("the key is not on the curve P-256")


def _named(label: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, label)])


def _label_of(name: x509.Name) -> str:
    found = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if found else ""


def _role_of(uris: list[str]) -> CertRole:
    roles = [uri.removeprefix(_ROLE_URI) for uri in uris if uri.startswith(_ROLE_URI)]
    if len(roles) != 1:
        raise ValueError(f"it names {len(roles)} roles")
    return CertRole(roles[0])


def _dated(key: PublicKey, *, now: float, life_s: float) -> x509.CertificateBuilder:
    moment = datetime.datetime.fromtimestamp(now, datetime.UTC).replace(microsecond=0)
    return (
        x509.CertificateBuilder()
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(moment - datetime.timedelta(seconds=BACKDATED_S))
        .not_valid_after(moment + datetime.timedelta(seconds=life_s))
    )


def _key_usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        encipher_only=False,
        decipher_only=False,
    )
