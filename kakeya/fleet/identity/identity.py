"""The identity of this node in its fleet, and its files.

    <data>/identity/key.pem           the node's private key; its hash is the node's id
                    cert.pem          the authority's certificate of that key; renewed
                    ca.pem            the authority's own certificate: the root of trust
                    ca-key.pem        the authority's private key; on one node of the fleet
                    revocations.bin   keys that the fleet no longer trusts
                    peers.txt         members to gossip with first, told when this node joined
                    host-cert.pem     a certificate of the same key for HTTPS; made when needed

The folder is made whole, by one rename; only cert.pem, host-cert.pem and revocations.bin change
afterwards. A damaged or missing file stops the start with an error that names it. A node never
draws a new key in place of an unreadable one, since that would make it another node.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from kakeya.core.errors import ConfigError
from kakeya.core.files import sync_folder, write_atomically
from kakeya.core.log import event
from kakeya.fleet.identity.certificates import (
    BACKDATED_S,
    CertHolder,
    PrivateKey,
    PublicKey,
    Untrusted,
    authority_key,
    certificate_pem,
    is_pair,
    key_pem,
    read_authority,
    read_holder,
    read_key,
    read_leaf,
    spki_hash,
)
from kakeya.wire.security import CertRole, TlsMaterial
from kakeya.wire.tls import IDENTITY_FOLDER, any_member, fleet_name

_log = logging.getLogger(__name__)
FOLDER = IDENTITY_FOLDER
KEY, CERTIFICATE, AUTHORITY, AUTHORITY_KEY = "key.pem", "cert.pem", "ca.pem", "ca-key.pem"
REVOCATIONS, PEERS = "revocations.bin", "peers.txt"
RENEW_AFTER = 2 / 3
"""Share of a certificate's life before renewal: four months are left to reach the authority."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A node's place in a fleet. A renewal makes a new value with the same key and id."""

    node_id: str
    label: str
    role: CertRole
    authority_hash: bytes
    """The `spki_hash` of the authority's key, from which the fleet has its name."""
    tls: TlsMaterial = field(repr=False)
    not_before_at: float
    not_after_at: float
    ca_key: bytes | None = field(default=None, repr=False)
    """PEM; only the fleet's authority has it."""

    @property
    def fleet(self) -> str:
        """The fleet's name; 16 hex digits."""
        return fleet_name(self.authority_hash)

    @property
    def is_authority(self) -> bool:
        """Whether this node can issue, renew and revoke."""
        return self.ca_key is not None

    @property
    def member_name(self) -> str:
        """The name that every member's certificate carries, for addresses without a known node."""
        return any_member(self.fleet)

    @property
    def renew_at(self) -> float:
        """When the certificate should be renewed."""
        made_at = self.not_before_at + BACKDATED_S
        return made_at + RENEW_AFTER * (self.not_after_at - made_at)

    def fault_at(self, now: float) -> str:
        """The fault of the certificate at a time, with its remedy; "" = none."""
        if now > self.not_after_at:
            late = duration(now - self.not_after_at)
            return (
                f"the certificate of this node ended {late} ago; set the clock if "
                "it is wrong, else run `kakeya invite` on the fleet's authority and "
                "`kakeya join TOKEN` here"
            )
        if now < self.not_before_at:
            return (
                f"the clock of this machine is {duration(self.not_before_at - now)} before its own "
                "certificate begins; set it (on a Mac: sudo sntp -sS time.apple.com)"
            )
        return ""


def identity_of(
    key: PrivateKey, certificate: bytes, authority: bytes, *, ca_key: bytes | None = None
) -> Identity:
    """Build an identity from PEM texts. Raises Untrusted when they do not fit together."""
    root = read_authority(authority)
    leaf = read_leaf(certificate)
    holder = read_holder(leaf, root)
    if not is_pair(key, holder.public_key):
        raise Untrusted("the private key is not the certificate's")
    # Written again, so that TLS reads exactly the form that was checked here.
    tls = TlsMaterial(
        key=key_pem(key), certificate=certificate_pem(leaf), authority=certificate_pem(root)
    )
    return _identity(holder, spki_hash(authority_key(root)), tls, ca_key)


def _identity(
    holder: CertHolder, authority_hash: bytes, tls: TlsMaterial, ca_key: bytes | None
) -> Identity:
    return Identity(
        node_id=holder.node_id,
        label=holder.label,
        role=holder.role,
        authority_hash=authority_hash,
        tls=tls,
        not_before_at=holder.not_before_at,
        not_after_at=holder.not_after_at,
        ca_key=ca_key,
    )


def renewed(identity: Identity, certificate: bytes, now: float) -> Identity:
    """Return the identity with a new certificate.

    Raises Untrusted unless it is for the same key and role, of the same fleet, valid now, and
    lasts as long as the present certificate, if that one is valid.
    """
    key = read_key(identity.tls.key)
    new = identity_of(key, certificate, identity.tls.authority, ca_key=identity.ca_key)
    if new.role is not identity.role:
        raise Untrusted(f"the new certificate is for a {new.role}, not a {identity.role}")
    if not new.not_before_at <= now <= new.not_after_at:
        raise Untrusted(
            "the new certificate does not count at this machine's time: its clock and the "
            "authority's are days apart; set the one that is wrong"
        )
    if new.not_after_at < identity.not_after_at and not identity.fault_at(now):
        raise Untrusted("the new certificate ends before the one that is held")
    return new


def load_identity(data_dir: Path) -> Identity | None:
    """Read the identity of the node that lives in a data directory; None when it has none.

    Raises ConfigError that names the file which is missing, damaged or does not belong.
    """
    folder = data_dir / FOLDER
    if not folder.is_dir():
        return None
    key = load_key(folder / KEY)
    ca_path, certificate_path = folder / AUTHORITY, folder / CERTIFICATE
    try:
        root = read_authority(_read(ca_path))
    except Untrusted as problem:
        _damaged(ca_path, problem)
    certificate = _read(certificate_path)
    try:
        holder = read_holder(read_leaf(certificate), root)
    except Untrusted as problem:
        _damaged(certificate_path, problem)
    _check_pair(folder / KEY, key, holder.public_key, CERTIFICATE)
    ca_key = _load_authority_key(folder / AUTHORITY_KEY, authority_key(root))
    return identity_of(key, certificate, certificate_pem(root), ca_key=ca_key)


def load_key(path: Path) -> PrivateKey:
    """Read a private key. Raises ConfigError that names the file."""
    pem = _read(path)
    if path.stat().st_mode & 0o077:
        event(
            _log,
            "private key was readable for other users; its permissions are repaired",
            level=logging.WARNING,
            file=path,
        )
        path.chmod(0o600)
    try:
        return read_key(pem)
    except Untrusted as problem:
        _damaged(path, problem)


def _load_authority_key(path: Path, public: PublicKey) -> bytes | None:
    if not path.exists():
        return None
    key = load_key(path)
    _check_pair(path, key, public, AUTHORITY)
    return key_pem(key)


def _check_pair(path: Path, key: PrivateKey, public: PublicKey, other: str) -> None:
    if not is_pair(key, public):
        _damaged(path, Untrusted(f"it is not the key of {other}"))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as problem:
        raise ConfigError(
            f"{path} cannot be read: {problem.strerror or problem}; {_mend(path.parent)}"
        ) from problem


def _damaged(path: Path, problem: Untrusted) -> NoReturn:
    raise ConfigError(f"{path} is damaged: {problem}; {_mend(path.parent)}") from problem


def _mend(folder: Path) -> str:
    return (
        f"restore it from a backup, or move {folder} away and join the fleet anew with "
        "`kakeya join TOKEN`"
    )


def save_identity(
    data_dir: Path, identity: Identity, *, peers: Sequence[str] = (), revocations: bytes = b""
) -> None:
    """Write a new identity, whole or not at all, with the members that the fleet told.

    Raises ConfigError when the node has an identity already, or when it cannot be written.
    """
    folder = data_dir / FOLDER
    if folder.exists():
        raise ConfigError(f"{folder} exists; this node has an identity already")
    files = {
        KEY: identity.tls.key,
        CERTIFICATE: identity.tls.certificate,
        AUTHORITY: identity.tls.authority,
        PEERS: "".join(f"{peer}\n" for peer in peers).encode(),
    }
    if revocations:
        files[REVOCATIONS] = revocations
    if identity.ca_key is not None:
        files[AUTHORITY_KEY] = identity.ca_key
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_folder(folder, files)
    except OSError as problem:
        raise ConfigError(
            f"the identity cannot be written to {folder}: {problem.strerror or problem}"
        ) from problem


def _write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    # Left by a killed try: the folder may hold a private key and would lie there for ever.
    for left in folder.parent.glob(f".{FOLDER}.*"):
        shutil.rmtree(left, ignore_errors=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{FOLDER}.", dir=folder.parent))
    try:
        for name, content in files.items():
            write_atomically(aside / name, content)
        aside.rename(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    sync_folder(folder.parent)


def save_certificate(data_dir: Path, identity: Identity) -> None:
    """Replace the certificate on disk by the one of a renewed identity. Raises OSError."""
    write_atomically(data_dir / FOLDER / CERTIFICATE, identity.tls.certificate)


def load_peers(data_dir: Path) -> tuple[str, ...]:
    """The members to gossip with first, as gRPC addresses that the fleet told at joining."""
    try:
        lines = (data_dir / FOLDER / PEERS).read_text("utf-8", "replace").split()
    except OSError:
        return ()
    return tuple(dict.fromkeys(lines))


def duration(seconds: float) -> str:
    """Write a time span for people, in its largest unit."""
    for unit, name in ((86_400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} seconds"
