"""The trust of a node: in cards by their seals, in callers by certificates, never in revoked keys.

Verdicts on cards are remembered by digest, so that a card costs its two curve operations once and
every later look one hash. The list of revoked keys is applied the moment it comes.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kakeya.core.errors import ConfigError
from kakeya.fleet.cards.cards import MAX_FORGED, Card, CardFault
from kakeya.fleet.identity.certificates import (
    CertHolder,
    Untrusted,
    authority_key,
    certificate_der,
    read_authority,
    read_der,
    read_holder,
    read_key,
    read_leaf,
)
from kakeya.fleet.identity.identity import Identity
from kakeya.fleet.identity.revocations import NONE, BadList, Revocations, read_list, sign_list
from kakeya.fleet.identity.seal import BrokenSeal, certificate_mark, open_seal, seal
from kakeya.wire.security import Certified, CertRole, TlsMaterial

_GOOD_VERDICTS, _BAD_VERDICTS, _HOLDERS = 8192, 1024, 8192
"""Twice the cards that a registry holds; verdicts on forgeries are kept apart, so that a flood of
them displaces no honest card's verdict."""
Kept = TypeVar("Kept")


@dataclass(frozen=True, slots=True)
class _Verdict:
    """The verdict on a card's bytes: its signer, or its fault."""

    holder: CertHolder | None
    fault: CardFault | None


class FleetTrust:
    """The trust of one node in cards and callers. Safe to warm from a thread.

    `on_revoked`, like every subscriber, is called with the ids that a new list adds.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        revocations: Revocations = NONE,
        on_revoked: Callable[[frozenset[str]], None] | None = None,
    ) -> None:
        """Raises Untrusted for an identity with parts that do not fit together."""
        self._root = read_authority(identity.tls.authority)
        self._revoked = revocations
        self._subscribers = [on_revoked] if on_revoked is not None else []
        self._good: _Bounded[_Verdict] = _Bounded(_GOOD_VERDICTS)
        self._bad: _Bounded[_Verdict] = _Bounded(_BAD_VERDICTS)
        self._holders: _Bounded[CertHolder] = _Bounded(_HOLDERS)
        self._adopt(identity)

    @property
    def identity(self) -> Identity:
        """The own identity, as of the last renewal."""
        return self._identity

    def adopt(self, identity: Identity) -> None:
        """Take over a renewed certificate, for all later cards and connections."""
        if identity.node_id != self._identity.node_id:
            raise Untrusted(f"{identity.node_id} is another node than {self._identity.node_id}")
        self._adopt(identity)

    def _adopt(self, identity: Identity) -> None:
        self._identity = identity
        self._key = read_key(identity.tls.key)
        self._certificate = certificate_der(read_leaf(identity.tls.certificate))

    def material(self) -> TlsMaterial:
        """The key and certificate that channels and listeners present."""
        return self._identity.tls

    # Cards

    def seal(self, body: bytes) -> bytes:
        """Return the card of a body that has neither certificate nor signature."""
        return seal(body, certificate=self._certificate, key=self._key)

    def fault_of(self, card: Card, now: float) -> CardFault | None:
        """The fault of the seal of a card that was read from its bytes; None = none."""
        verdict = self._verdict(card.wire, card.digest)
        holder = verdict.holder
        if holder is None:
            return verdict.fault
        if card.node_id != holder.node_id:
            return CardFault.FORGED
        if holder.node_id in self._revoked.node_ids:
            return CardFault.REVOKED
        return None if holder.is_valid_at(now) else CardFault.UNSIGNED

    def warm(self, wires: Sequence[bytes]) -> None:
        """Check cards ahead of `fault_of`, which then only looks the verdicts up.

        A liar can sign many costly cards, so only one of each certificate is checked, and none
        after `MAX_FORGED` forged ones. A registry takes no more of one message either.
        """
        forged = 0
        met: set[bytes] = set()
        for wire in wires:
            mark = certificate_mark(wire)
            if mark in met:
                continue
            verdict = self._verdict(wire, hashlib.sha256(wire).digest())
            if verdict.holder is not None:
                met.add(mark)
            forged += verdict.fault is CardFault.FORGED
            if forged >= MAX_FORGED:
                return

    def _verdict(self, wire: bytes, digest: bytes) -> _Verdict:
        known = self._good.get(digest) or self._bad.get(digest)
        if known is not None:
            return known
        try:
            verdict = _Verdict(self._signer_of(wire), None)
        except BrokenSeal as broken:
            verdict = _Verdict(None, broken.fault)
        (self._good if verdict.holder is not None else self._bad).put(digest, verdict)
        return verdict

    def _signer_of(self, wire: bytes) -> CertHolder:
        opened = open_seal(wire)
        try:
            holder = self._holder(opened.certificate)
        except Untrusted:
            raise BrokenSeal(CardFault.FORGED) from None
        if holder.role is not CertRole.MEMBER or not opened.is_by(holder.public_key):
            raise BrokenSeal(CardFault.FORGED)
        return holder

    def _holder(self, der: bytes) -> CertHolder:
        digest = hashlib.sha256(der).digest()
        known = self._holders.get(digest)
        if known is None:
            known = read_holder(read_der(der), self._root)
            self._holders.put(digest, known)
        return known

    # Callers

    def caller_of(self, cert_pem: bytes) -> Certified | None:
        """The holder that a certificate names; None = not of this fleet.

        TLS has checked its dates, but only when the connection was made.
        """
        try:
            holder = self._holder(certificate_der(read_leaf(cert_pem)))
        except Untrusted:
            return None
        return Certified(holder.node_id, holder.role, holder.not_after_at)

    # Revocation

    @property
    def revocations(self) -> tuple[int, bytes]:
        """Version and signed bytes of the held list; (0, b"") = the fleet never made one."""
        return self._revoked.version, self._revoked.blob

    @property
    def revoked(self) -> Revocations:
        """The held list."""
        return self._revoked

    def is_revoked(self, node_id: str) -> bool:
        """Whether the fleet revoked a node."""
        return node_id in self._revoked.node_ids

    def subscribe(self, on_revoked: Callable[[frozenset[str]], None]) -> None:
        """Call a function with the ids that each new list adds, perhaps none, at once."""
        self._subscribers.append(on_revoked)

    def apply_revocations(self, blob: bytes) -> bool:
        """Take a list from any source; returns whether it replaced the held one.

        The authority may have lost its own list or made two, and so merges the entries of both.
        """
        try:
            found = read_list(blob, authority_key(self._root))
        except BadList:
            return False
        held = self._revoked
        if self._identity.is_authority and not held.node_ids <= found.node_ids:
            if found.node_ids <= held.node_ids and found.version <= held.version:
                return False
            latest = max(found, held, key=lambda each: each.version)
            found = self._sign(found.node_ids | held.node_ids, after=latest, now=latest.made_at)
        if found.version <= held.version:
            return False
        self._take(found)
        return True

    def revoke(self, node_id: str, now: float) -> Revocations:
        """Exclude a node from the fleet; returns the new list.

        Raises ConfigError on a node that is not the authority, Untrusted for a text that is no
        key's id.
        """
        if self.is_revoked(node_id):
            return self._revoked
        self._take(self._sign(self._revoked.node_ids | {node_id}, after=self._revoked, now=now))
        return self._revoked

    def _sign(self, node_ids: frozenset[str], *, after: Revocations, now: float) -> Revocations:
        if self._identity.ca_key is None:
            raise ConfigError("this node is not the fleet's authority, which alone can revoke")
        return sign_list(node_ids, after=after, key=read_key(self._identity.ca_key), now=now)

    def _take(self, found: Revocations) -> None:
        added = found.node_ids - self._revoked.node_ids
        self._revoked = found
        for told in self._subscribers:
            told(added)


class _Bounded(Generic[Kept]):
    """The latest entries by digest; a lock, because verdicts come from a thread too."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: dict[bytes, Kept] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, digest: bytes) -> Kept | None:
        return self._kept.get(digest)

    def put(self, digest: bytes, value: Kept) -> None:
        with self._lock:
            self._kept[digest] = value
            while len(self._kept) > self._limit:
                del self._kept[next(iter(self._kept))]
