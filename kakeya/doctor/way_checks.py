"""Judge dials from this node to a peer's endpoints, and from the peer to this node's. Pure.

A way that fails is a warning while another way to the same node works, and a fault otherwise:
gossip and drafts need one way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kakeya.doctor.dials import DialAttempt, DialOutcome
from kakeya.doctor.mends import (
    JOIN,
    LOCAL_NETWORK,
    OPEN_LOCAL_NETWORK,
    is_mac,
    open_port,
    set_clock,
    show_link,
    show_listener,
    show_route,
    span,
)
from kakeya.doctor.report import Finding, Severity, ok, shell, warning
from kakeya.fleet.cards.cards import Endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """Facts of this machine on which a dial depends.

    `link_to` is the own interface that shares a network with the dialled host, "" = none; `is_cut`
    tells that it has no carrier; `pings` whether the host answers ping, None = not tried.
    """

    platform: str
    python: str
    is_member: bool = False
    link_to: str = ""
    is_cut: bool = False
    pings: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The examined node; `name` is readable, `node_id` "" = unknown."""

    name: str
    node_id: str = ""
    platform: str = ""


class _Cause(NamedTuple):
    """Why a dial failed, the command that mends it, and whether to type it at the peer."""

    detail: str
    command: str
    is_theirs: bool = False


def check_way(
    way: Endpoint, dial: DialAttempt, peer: Peer, here: Here, *, now: float, others_work: bool
) -> Finding:
    """Judge a dial from this node to one endpoint of a peer."""
    what = f"reach {way.address}" + (f" ({way.network})" if way.network else "")
    if dial.outcome is DialOutcome.ANSWERED and dial.node_id in (peer.node_id, ""):
        return ok(what, f"answers after {dial.rtt_ms:.1f} ms", peer=peer.name)
    if dial.outcome is DialOutcome.ANSWERED and not peer.node_id:
        return ok(what, f"{dial.node_id} answers after {dial.rtt_ms:.1f} ms", peer=peer.name)
    cause = _cause(dial, peer, here, now)
    return _bad(what, cause, peer, others_work=others_work)


def not_dialled(address: str, reason: str, peer: Peer) -> Finding:
    """Make the finding for an address of a card that this node never dials by itself."""
    return ok(f"reach {address}", f"not dialled, nor ever used: {reason}", peer=peer.name)


def _cause(dial: DialAttempt, peer: Peer, here: Here, now: float) -> _Cause:
    match dial.outcome:
        case DialOutcome.ANSWERED:
            return _Cause(
                f"another node answers there: {dial.node_id}; it has the address now",
                "kakeya status",
            )
        case DialOutcome.UNTRUSTED:
            return _cause_of_distrust(dial, here, now)
        case DialOutcome.DENIED:
            return _Cause(f"the node there answers and refuses this one: {dial.error}", JOIN)
        case DialOutcome.SILENT | DialOutcome.NO_NODE | DialOutcome.REFUSED:
            return _cause_at_port(dial)
        case _:
            return _cause_in_network(dial, peer, here)


def _cause_at_port(dial: DialAttempt) -> _Cause:
    """Explain a dial that reached a machine but no node."""
    port = _port(dial.address)
    if dial.outcome is DialOutcome.REFUSED:
        return _Cause(
            f"the machine is there and refuses port {port}: no node listens at that address; start "
            "it as it was started before",
            "kakeya-node",
            is_theirs=True,
        )
    if dial.outcome is DialOutcome.SILENT:
        detail = (
            f"port {port} accepts the connection and does not answer: the node there hangs, or "
            "another program has the port"
        )
    else:
        detail = f"another program answers on port {port} ({dial.error})"
    return _Cause(detail, show_listener(port), is_theirs=True)


def _cause_in_network(dial: DialAttempt, peer: Peer, here: Here) -> _Cause:
    """Explain a dial without a connection."""
    host, port = _host(dial.address), _port(dial.address)
    match dial.outcome:
        case DialOutcome.TIMEOUT | DialOutcome.HOST_UNREACHABLE if here.is_cut:
            return _Cause(
                f"the own link {here.link_to} has no carrier: plug its cable in, and look whether "
                "what is at the other end is on",
                show_link(here.platform, here.link_to),
            )
        case DialOutcome.TIMEOUT:
            return _Cause(
                f"no answer at all: a firewall there drops calls to port {port}, or the machine "
                "sleeps or is off",
                open_port(peer.platform or here.platform, port),
                is_theirs=True,
            )
        case DialOutcome.HOST_UNREACHABLE if _is_private(dial, here.platform) and here.pings:
            return _Cause(
                f"macOS keeps this node from the local network (errno {dial.errno} though {host} "
                f"answers a ping): {LOCAL_NETWORK}",
                OPEN_LOCAL_NETWORK,
            )
        case DialOutcome.HOST_UNREACHABLE:
            # Without a permission macOS says the same of a machine on an own network.
            second = f"; if it is on, {LOCAL_NETWORK}" * bool(
                _is_private(dial, here.platform) and here.link_to
            )
            return _Cause(
                f"no machine has the address {host} now ({_errno(dial)}): it is off, asleep or on "
                f"another network{second}",
                shell("ping", "-c", "3", host),
            )
        case DialOutcome.NO_ROUTE:
            return _Cause(
                f"this machine has no way to {host} ({_errno(dial)}): join the same network, or "
                "plug the cable in",
                show_route(here.platform, host),
            )
        case DialOutcome.FORBIDDEN:
            return _Cause(
                f"this machine forbids the call ({_errno(dial)}): a firewall rule or a sandbox",
                open_port(here.platform, port, here.python),
            )
        case _:
            return _Cause(f"the call failed: {_errno(dial)}", show_route(here.platform, host))


def _cause_of_distrust(dial: DialAttempt, here: Here, now: float) -> _Cause:
    """Explain a connection on which one of the two nodes did not trust the other."""
    shown = dial.shown
    if shown is not None and not here.is_member:
        return _Cause("the node there belongs to a fleet, and this one to none", JOIN)
    if shown is not None and now > shown.not_after_at:
        detail = f"its certificate expired {span(now - shown.not_after_at)} ago ({dial.error})"
        return _Cause(detail, JOIN, is_theirs=True)
    if shown is not None and now < shown.not_before_at:
        return _Cause(
            f"its certificate becomes valid in {span(shown.not_before_at - now)}: one of the two "
            "clocks is wrong, likely this one",
            set_clock(here.platform),
        )
    if shown is not None:
        detail = (
            f"its certificate is valid now, yet one node does not trust the other ({dial.error})"
        )
        return _Cause(f"{detail}: another fleet, or revoked", JOIN, is_theirs=True)
    if here.is_member:
        detail = f"it shows no certificate ({dial.error}): it belongs to no fleet"
        return _Cause(detail, JOIN, is_theirs=True)
    detail = f"port {_port(dial.address)} ends the connection ({dial.error})"
    return _Cause(detail, show_listener(_port(dial.address)), is_theirs=True)


def check_path(
    used: str, ways: Sequence[tuple[Endpoint, DialAttempt]], peer: Peer
) -> Finding | None:
    """Judge whether calls use the best way that works; None if no way works."""
    working = {
        way.address: (way, dial) for way, dial in ways if dial.outcome is DialOutcome.ANSWERED
    }
    if not working:
        return None
    best, best_dial = min(working.values(), key=lambda pair: (_rank(pair[0]), pair[1].rtt_ms))
    wished = min((way for way, _ in ways), key=_rank)
    if used in working and _rank(working[used][0]) > _rank(best):
        way, dial = working[used]
        return warning(
            "path",
            f"calls go over {_named(way)} ({dial.rtt_ms:.1f} ms) although {_named(best)} works "
            f"({best_dial.rtt_ms:.1f} ms); a node takes the better way back within 30 s",
            shell("kakeya", "doctor", peer.name),
            peer=peer.name,
        )
    if _rank(wished) < _rank(best):
        return warning(
            "path",
            f"calls go over {_named(best)} because {_named(wished)} does not work",
            _mend_link(wished, peer),
            peer=peer.name,
        )
    of = f", the best of {len(ways)} ways" if len(ways) > 1 else ""
    return ok("path", f"calls go over {_named(best)}{of}", peer=peer.name)


def check_back(dial: DialAttempt, peer: Peer, here: Here, *, others_work: bool) -> Finding:
    """Judge a dial from the peer to one address of this node."""
    what = f"reached at {dial.address}"
    if dial.outcome is DialOutcome.ANSWERED:
        detail = f"{peer.name} reaches this node after {dial.rtt_ms:.1f} ms"
        return ok(what, detail, peer=peer.name)
    return _bad(what, _cause_of_back(dial, peer, here), peer, others_work=others_work)


def _cause_of_back(dial: DialAttempt, peer: Peer, here: Here) -> _Cause:
    match dial.outcome:
        case DialOutcome.TIMEOUT:
            return _Cause(
                f"{peer.name} gets no answer: the firewall of this machine drops its calls",
                open_port(here.platform, _port(dial.address), here.python),
            )
        case DialOutcome.REFUSED:
            return _Cause(
                f"{peer.name} is refused: this node does not listen on that address",
                shell("kakeya-node", "--bind", dial.address),
            )
        case DialOutcome.HOST_UNREACHABLE if _is_private(dial, peer.platform):
            return _Cause(
                f"{peer.name} is a Mac that cannot call this node (errno {dial.errno}), which "
                f"calls it: there, {LOCAL_NETWORK}",
                OPEN_LOCAL_NETWORK,
                is_theirs=True,
            )
        case DialOutcome.HOST_UNREACHABLE | DialOutcome.NO_ROUTE:
            return _Cause(
                f"{peer.name} has no way to that address ({_errno(dial)})",
                show_route(peer.platform, _host(dial.address)),
                is_theirs=True,
            )
        case _:
            return _Cause(f"{peer.name} says: {dial.error}", "kakeya doctor", is_theirs=True)


def _bad(what: str, cause: _Cause, peer: Peer, *, others_work: bool) -> Finding:
    return Finding(
        level=Severity.WARNING if others_work else Severity.FAULT,
        what=what,
        detail=cause.detail,
        command=cause.command,
        on=peer.name if cause.is_theirs else "",
        peer=peer.name,
    )


def _rank(way: Endpoint) -> int:
    return way.priority or 1 << 30


def _named(way: Endpoint) -> str:
    return f"{way.network} {way.address}" if way.network else way.address


def _mend_link(way: Endpoint, peer: Peer) -> str:
    if way.network == "thunderbolt":
        return shell("networksetup", "-setdhcp", "Thunderbolt Bridge")
    return shell("kakeya", "doctor", peer.name)


def _is_private(dial: DialAttempt, platform: str) -> bool:
    """Whether the errno is the one by which macOS also refuses a program its local network; 64,
    of a host that is down, is none."""
    return is_mac(platform) and dial.errno == 65


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _port(address: str) -> str:
    return address.rpartition(":")[2]


def _errno(dial: DialAttempt) -> str:
    return f"errno {dial.errno}: {dial.error}" if dial.errno else dial.error
