"""Judge clocks, versions, ids, certificates, and a peer's view of this node. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kakeya.doctor.mends import JOIN, UPDATE, set_clock, span
from kakeya.doctor.report import Finding, fault, ok, shell, warning
from kakeya.doctor.way_checks import Peer
from kakeya.fleet.placement.ring import ring_path_available

SKEW_WARNING_S = 5.0
"""More than the error of a clock that is set by the network."""
_RENEW_GRACE_S = 86_400.0
"""How late a renewal may be: the authority may be off for a night."""
_MIN_JUDGES = 3
"""The number of peers that together outvote the own clock."""


class Protocols(NamedTuple):
    """The protocol versions that a node speaks; 0, 0 = a node without Kakeya's extensions."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.high) if self.low == self.high else f"{self.low} to {self.high}"


class CertificateDates(NamedTuple):
    """The begin, the renewal date and the end of the own certificate; wall seconds."""

    not_before_at: float
    renew_at: float
    not_after_at: float


def check_skew(skew_s: float, ttl_s: float, peer: Peer) -> Finding:
    """Judge by how much a peer's clock is ahead (negative: behind), against the own TTL."""
    size = abs(skew_s)
    if size <= SKEW_WARNING_S:
        return ok("clocks", f"{size:.1f} s apart", peer=peer.name)
    direction = "ahead of" if skew_s > 0 else "behind"
    detail = f"the clock of {peer.name} is {span(size)} {direction} this one"
    command = set_clock(peer.platform)
    if size <= ttl_s / 4:
        return warning("clocks", detail, command, on=peer.name, peer=peer.name)
    detail += f", more than a quarter of the {ttl_s:.0f} s for which a card counts"
    return fault("clocks", detail, command, on=peer.name, peer=peer.name)


def check_own_clock(skews: Mapping[str, float], platform: str) -> Finding | None:
    """Judge the own clock by the clocks of all peers; None if too few peers are known."""
    if len(skews) < _MIN_JUDGES:
        return None
    off = sorted(skew for skew in skews.values() if abs(skew) > SKEW_WARNING_S)
    if 2 * len(off) < len(skews):
        return ok("own clock", f"agrees with most of {len(skews)} peers")
    middle = off[len(off) // 2]
    side = "behind" if middle > 0 else "ahead of"
    return fault(
        "own clock",
        f"{len(off)} of {len(skews)} peers disagree with it: it is about {span(abs(middle))} "
        f"{side} theirs",
        set_clock(platform),
    )


def check_protocol(own: Protocols, theirs: Protocols, version: str, peer: Peer) -> Finding:
    """Judge whether the two nodes speak a common protocol, and which one is older."""
    if theirs.high == 0:
        detail = f"{peer.name} lacks Kakeya's extensions; gossip exchanges all cards with it"
        return ok("version", detail, peer=peer.name)
    if own.high < theirs.low:
        detail = f"{peer.name} is newer: it speaks protocol {theirs}, this node {own}"
        return fault("version", detail, UPDATE, peer=peer.name)
    if theirs.high < own.low:
        detail = f"{peer.name} is older: it speaks protocol {theirs}, this node {own}"
        return fault("version", detail, UPDATE, on=peer.name, peer=peer.name)
    named = f", version {version}" if version else ""
    return ok("version", f"{peer.name} speaks protocol {theirs}{named}", peer=peer.name)


def check_conflicts(
    conflicts: Sequence[str], *, data_dir: str, has_given_way: bool = False
) -> Finding:
    """Judge whether another process runs under this node's id; `conflicts` name its places."""
    if not conflicts:
        return ok("node id", "no other process uses it")
    places = "; ".join(conflicts)
    if has_given_way:
        return fault(
            "node id",
            f"the node at {places} had this node's id first, so this one left the fleet and serves "
            "nothing: the data directory is a copy. Move it away and let this node join by itself",
            shell("mv", data_dir, f"{data_dir}.copy"),
        )
    return fault(
        "node id",
        f"another process runs under this node's id ({places}) and its card is refused: the data "
        "directory was copied. Stop the copy, move its data directory away and let it join by "
        "itself",
        shell("mv", data_dir, f"{data_dir}.copy"),
        on="the machine of the copy",
    )


def check_rivals(rivals: Sequence[str], peer: Peer) -> Finding | None:
    """Judge whether other processes, at these addresses, run under a peer's id."""
    if not rivals:
        return None
    return fault(
        "node id",
        f"another process runs under the id of {peer.name} ({'; '.join(rivals)}) and its card is "
        "refused: a data directory was copied. Look there",
        shell("kakeya", "doctor"),
        on="the machine of the copy",
        peer=peer.name,
    )


def check_seen(age_s: float | None, ttl_s: float, address: str, peer: Peer) -> Finding:
    """Judge how long ago the peer at `address` heard of this node; None = never."""
    if age_s is None:
        return warning(
            "seen",
            f"{peer.name} has no card of this node: gossip has not reached it yet, or is refused",
            shell("kakeya-node", "--peer", address),
            peer=peer.name,
        )
    if age_s > ttl_s / 2:
        return warning(
            "seen",
            f"{peer.name} last heard of this node {span(age_s)} ago and forgets it after "
            f"{ttl_s:.0f} s",
            shell("kakeya", "doctor", peer.name),
            peer=peer.name,
        )
    return ok("seen", f"{peer.name} heard of this node {span(age_s)} ago", peer=peer.name)


def check_suspicion(peer: Peer, *, of_them: bool, of_us: bool) -> Finding | None:
    """Judge whether one of two nodes holds the other for silent; None = neither does."""
    if of_them:
        detail = f"this node finds that {peer.name} does not answer, and gives it no work"
        return warning("suspicion", detail, "kakeya doctor", on=peer.name, peer=peer.name)
    if of_us:
        detail = f"{peer.name} finds that this node does not answer, and gives it no work"
        command = "kakeya doctor"
        return warning("suspicion", detail, command, on=peer.name, peer=peer.name)
    return None


def check_certificate(dates: CertificateDates, now: float, platform: str) -> Finding:
    """Judge the dates of the own certificate."""
    what = "certificate"
    if now < dates.not_before_at:
        return fault(
            what,
            f"it becomes valid in {span(dates.not_before_at - now)}: the clock of this machine is "
            "behind",
            set_clock(platform),
        )
    if now > dates.not_after_at:
        return fault(
            what,
            f"it expired {span(now - dates.not_after_at)} ago, and no member trusts this node now; "
            "`kakeya invite` on the fleet's authority prints a token",
            JOIN,
        )
    left = span(dates.not_after_at - now)
    if now > dates.renew_at + _RENEW_GRACE_S:
        return warning(
            what,
            f"valid for {left} more and not renewed: the node that holds the fleet's authority "
            "was not reached",
            "kakeya-node",
            on="the fleet's authority",
        )
    return ok(what, f"valid for {left} more")


def check_membership(*, is_member: bool, is_revoked: bool, is_exposed: bool) -> Finding | None:
    """Judge a node without a fleet, or a revoked one; None for a member."""
    if is_revoked:
        detail = (
            "this node was removed from its fleet: no member answers it. `kakeya invite` on the "
            "fleet's authority prints a token to come back with"
        )
        return fault("fleet", detail, JOIN)
    if is_member:
        return None
    if is_exposed:
        detail = "this node listens to other machines without encryption or authentication"
        return warning("fleet", detail, "kakeya init")
    return ok("fleet", "none: this node is for this machine alone; kakeya init begins one")


def revoked_peer(peer: Peer) -> Finding:
    """Make the finding that the fleet has removed the peer; its answers do not count."""
    detail = (
        f"{peer.name} was removed from this fleet; `kakeya invite` on the fleet's authority "
        "prints a token for it to come back with"
    )
    return fault("fleet", detail, JOIN, on=peer.name, peer=peer.name)


def check_ring(own: str, theirs: str, peer: Peer) -> Finding | None:
    """Tell of a ring that two nodes share; None without one, as nodes in no group have no fault."""
    if not ring_path_available(own, theirs):
        return None
    return ok("ring", f"shared with {peer.name}: {own}, {theirs}", peer=peer.name)
