"""The fleet's authority: it founds a fleet, admits members and renews their certificates.

Its key lies on one node. The data path never needs it: a fleet without its authority goes on, and
only cannot admit new members.
"""

from __future__ import annotations

from pathlib import Path

from kakeya.core.errors import ConfigError, InvalidArgument
from kakeya.fleet.identity.certificates import (
    LEAF_LIFE_S,
    Request,
    Untrusted,
    authority_key,
    certificate_pem,
    is_pair,
    is_valid_label,
    issue,
    key_pem,
    make_authority,
    make_request,
    new_key,
    read_authority,
    read_key,
    read_request,
    spki_hash,
)
from kakeya.fleet.identity.identity import (
    FOLDER,
    Identity,
    identity_of,
    load_identity,
    save_identity,
)
from kakeya.wire.security import CertRole


class Authority:
    """Issues certificates of one fleet."""

    def __init__(self, certificate: bytes, key: bytes, *, life_s: float = LEAF_LIFE_S) -> None:
        """Take the authority's certificate and private key, PEM. Raises Untrusted."""
        self._root = read_authority(certificate)
        self._key = read_key(key)
        if not is_pair(self._key, authority_key(self._root)):
            raise Untrusted("the authority's key is not the key of its certificate")
        self._life_s = life_s
        self.certificate = certificate_pem(self._root)
        self.key_hash = spki_hash(self._key.public_key())

    def read(self, csr: bytes) -> Request:
        """Read a request for a certificate. Raises InvalidArgument."""
        try:
            return read_request(csr)
        except Untrusted as problem:
            raise InvalidArgument(str(problem), param="csr") from problem

    def issue(
        self, request: Request, *, role: CertRole, now: float, life_s: float | None = None
    ) -> bytes:
        """Return a certificate, PEM."""
        certificate = issue(
            request,
            role=role,
            authority_key=self._key,
            now=now,
            life_s=self._life_s if life_s is None else life_s,
        )
        return certificate_pem(certificate)

    def new_identity(
        self,
        label: str,
        *,
        role: CertRole = CertRole.MEMBER,
        now: float,
        life_s: float | None = None,
    ) -> Identity:
        """Draw a key and certify it, for a node on this side of the network."""
        key = new_key()
        request = self.read(make_request(key, label))
        certificate = self.issue(request, role=role, now=now, life_s=life_s)
        return identity_of(key, certificate, self.certificate)


def authority_of(identity: Identity, *, life_s: float = LEAF_LIFE_S) -> Authority | None:
    """The authority that a node holds; None for every node but one."""
    if identity.ca_key is None:
        return None
    return Authority(identity.tls.authority, identity.ca_key, life_s=life_s)


def new_fleet(label: str, now: float, *, life_s: float = LEAF_LIFE_S) -> Identity:
    """Found a fleet: its authority, and the identity of its first member.

    Raises InvalidArgument for a label that no certificate can carry.
    """
    if not is_valid_label(label):
        raise InvalidArgument(f"{label!r} is no label; give 1 to 64 bytes of printable text")
    root = new_key()
    certificate = certificate_pem(make_authority(root, now))
    ca_key = key_pem(root)
    first = Authority(certificate, ca_key, life_s=life_s).new_identity(label, now=now)
    return identity_of(read_key(first.tls.key), first.tls.certificate, certificate, ca_key=ca_key)


def create_fleet(data_dir: Path, label: str, now: float) -> Identity:
    """Found a fleet with the node of a data directory as its authority, and write its files.

    Raises ConfigError when the node is a member of a fleet already.
    """
    identity = load_identity(data_dir)
    if identity is not None:
        raise ConfigError(already_member(identity, data_dir))
    founded = new_fleet(label, now)
    save_identity(data_dir, founded)
    return founded


def already_member(identity: Identity, data_dir: Path) -> str:
    """Explain why a node founds or joins no second fleet, and how to leave the first."""
    return (
        f"this node is {identity.label} of fleet {identity.fleet} already; to leave that fleet "
        f"for good, stop the node and move {data_dir / FOLDER} away"
    )
