"""A fleet's authority and what it certifies: of each role, expired, of another fleet."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

from kakeya.fleet.identity.authority import authority_of, new_fleet
from kakeya.fleet.identity.identity import Identity
from kakeya.fleet.identity.trust import FleetTrust
from kakeya.wire.security import CertRole, TlsMaterial
from kakeya.wire.tls import AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE

EXPIRED = timedelta(days=400)


class Fleet:
    """A new fleet, as its authority's node knows it."""

    def __init__(self) -> None:
        self.founder = new_fleet("founder", time.time())
        authority = authority_of(self.founder)
        assert authority is not None
        self._authority = authority
        self.trust = FleetTrust(self.founder)
        self.pem = self.founder.tls.authority
        self.any_member = self.founder.member_name

    def identity(
        self, role: CertRole = CertRole.MEMBER, *, age: timedelta = timedelta()
    ) -> Identity:
        """A new key and its certificate, made `age` ago."""
        made_at = time.time() - age.total_seconds()
        return self._authority.new_identity("somebody", role=role, now=made_at)

    def issue(
        self, role: CertRole = CertRole.MEMBER, *, age: timedelta = timedelta()
    ) -> tuple[str, TlsMaterial]:
        """A new node id and what its holder shows."""
        identity = self.identity(role, age=age)
        return identity.node_id, identity.tls

    def revoke(self, node_id: str) -> None:
        self.trust.revoke(node_id, time.time())


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
