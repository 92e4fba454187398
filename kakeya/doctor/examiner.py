"""The running node's examination: of itself, of its peers, and by its peers.

    itself     the machine; the own addresses, dialled; certificate, clock, id
    each peer  every endpoint dialled anew, then the peer is asked to dial back (DoctorService)

All checks run concurrently and end within `LIMIT_S`, even if no peer answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace

import grpc
import grpc.aio

from kakeya.core.clock import Clock
from kakeya.core.settings import is_loopback
from kakeya.doctor import checks, machine_checks, way_checks
from kakeya.doctor.checks import CertificateDates, Protocols
from kakeya.doctor.dials import DialAttempt, Dialler, DialOutcome, outcome_of
from kakeya.doctor.machine import Machine
from kakeya.doctor.mends import JOIN, UPDATE
from kakeya.doctor.report import Examination, Finding, encode_report, fault, ok, shell, warning
from kakeya.doctor.service import MAX_ADDRESSES, NOT_YOURS
from kakeya.doctor.targets import MAX_PEERS, Target, find_targets, name_of, ways_of
from kakeya.doctor.way_checks import Here, Peer
from kakeya.fleet.cards.cards import PROTOCOL_MAX, PROTOCOL_MIN, Card, Endpoint
from kakeya.fleet.identity.identity import Identity
from kakeya.fleet.paths.discovery import DiscoveryStats
from kakeya.fleet.view.registry import CapabilityRegistry
from kakeya.v1 import fleet_pb2 as pb
from kakeya.v1.fleet_pb2_grpc import DoctorServiceStub
from kakeya.wire.status import plain_details

LIMIT_S = 9.0
_BACK_S = 4.0
"""The limit of one check by a peer: its concurrent dials take at most 3 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """Facts that only the running node knows; each function is called at each examination.

    `skews` are seconds by which peers' clocks are ahead, by node id; `route` is the address of
    calls to a node now. `is_revoked` takes a node id; `why_not_dial` takes an address of a card and
    returns "" or the reason against it; `mdns` is None where nothing is announced;
    `warnings` are the node's own of its status.
    """

    identity: Callable[[], Identity | None]
    is_revoked: Callable[[str], bool]
    skews: Callable[[], Mapping[str, float]]
    route: Callable[[Card], str]
    why_not_dial: Callable[[str], str] = lambda address: ""
    mdns: Callable[[], DiscoveryStats | None] = lambda: None
    warnings: Callable[[], Sequence[str]] = list


class Examiner:
    """Examines on request; keeps no state between two examinations."""

    def __init__(
        self,
        registry: CapabilityRegistry,
        view: FleetView,
        machine: Machine,
        *,
        clock: Clock,
        dialler: Dialler,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._registry = registry
        self._view = view
        self._machine = machine
        self._clock = clock
        self._dialler = dialler
        self._limit_s = limit_s

    async def examine_json(self, peer: str) -> str:
        """Examine, and return the report as JSON text for ControlService."""
        return encode_report(await self.examine(peer))

    async def examine(self, peer: str) -> Examination:
        """Examine this node and one peer (HOST:PORT, node id, its beginning, label); "" = all.

        Raises NotFound and InvalidArgument for a peer that names no node.
        """
        started_mono = self._clock.mono()
        own, *others = self._registry.snapshot(mono=started_mono)
        targets = find_targets(peer, others)
        if self._view.is_revoked(self._registry.node_id):
            targets = ()  # every address would say the same
        async with asyncio.TaskGroup() as group:
            parts = [
                group.create_task(self._bounded("machine", self._machine.examine())),
                group.create_task(self._bounded("own addresses", self._examine_self(own))),
            ]
            for target in targets:
                work = self._examine_peer(target)
                parts.append(group.create_task(self._bounded("peer", work, target.peer.name)))
        lines = [line for part in parts for line in part.result()]
        lines += self._judge_fleet(others, peer)
        seconds = self._clock.mono() - started_mono
        return Examination(node=name_of(own), lines=tuple(lines), seconds=seconds)

    async def _bounded(
        self, what: str, work: Coroutine[None, None, Sequence[Finding]], peer: str = ""
    ) -> Sequence[Finding]:
        try:
            async with asyncio.timeout(self._limit_s):
                return await work
        except TimeoutError:
            again = shell("kakeya", "doctor", *((peer,) if peer else ()))
            detail = f"not examined within {self._limit_s:g} s: this machine or the peer is busy"
            return (warning(what, detail, again, peer=peer),)

    # --- this node

    async def _examine_self(self, own: Card) -> list[Finding]:
        now = self._clock.wall()
        me = Peer(name=name_of(own), node_id=own.node_id, platform=own.platform)
        is_revoked = self._view.is_revoked(self._registry.node_id)
        # A revoked node does not trust itself either.
        dials = [] if is_revoked else await self._dial_all(ways_of(own))
        lines = [check_own_address(dial, me) for _, dial in dials]
        identity = self._view.identity()
        if identity is not None:
            dates = CertificateDates(
                identity.not_before_at, identity.renew_at, identity.not_after_at
            )
            lines.append(checks.check_certificate(dates, now, self._machine.platform))
        member = checks.check_membership(
            is_member=identity is not None,
            is_revoked=is_revoked,
            is_exposed=any(not is_loopback(way.address) for way, _ in dials),
        )
        clock = checks.check_own_clock(self._view.skews(), self._machine.platform)
        conflicts = [c.address for c in self._registry.conflicts(now) if c.is_own]
        ids = checks.check_conflicts(
            conflicts,
            data_dir=str(self._machine.data_dir),
            has_given_way=self._registry.own_card.is_leaving,
        )
        lines += [
            warning("node", text, shell("kakeya", "status")) for text in self._view.warnings()
        ]
        mdns = self._view.mdns()
        if mdns is not None:
            lines.append(machine_checks.check_multicast(mdns, self._machine.platform))
        return [line for line in (*lines, member, clock, ids) if line is not None]

    def _judge_fleet(self, others: Sequence[Card], wanted: str) -> list[Finding]:
        if wanted or self._view.is_revoked(self._registry.node_id):
            return []
        if not others:
            detail = "no other node is known; the two-sided checks need one"
            is_in_fleet = self._view.identity() is not None
            return [warning("peers", detail, shell("kakeya", "invite" if is_in_fleet else "init"))]
        left = len(others) - MAX_PEERS
        if left > 0:
            detail = f"{MAX_PEERS} of {len(others)} were looked at; name one to look at it"
            return [ok("peers", detail)]
        return []

    # --- a peer

    async def _examine_peer(self, target: Target) -> list[Finding]:
        reasons = self._reasons_against(target)
        dials = await self._dial_all([w for w in target.ways if w.address not in reasons])
        target = self._with_card(target, dials)
        peer = target.peer
        if peer.node_id and self._view.is_revoked(peer.node_id):
            return [checks.revoked_peer(peer)]
        lines = [way_checks.not_dialled(a, reason, peer) for a, reason in reasons.items()]
        rivals = checks.check_rivals(self._rivals_of(target.card), peer)
        lines += [rivals] if rivals is not None else []
        lines += await self._judge_ways(dials, peer)
        used = self._view.route(target.card) if target.card else target.ways[0].address
        path = way_checks.check_path(used, dials, peer)
        working = [dial for _, dial in dials if dial.outcome is DialOutcome.ANSWERED]
        if path is None or not working:
            return lines
        lines.append(path)
        address = used if any(dial.address == used for dial in working) else working[0].address
        return lines + await self._ask_back(address, target)

    def _rivals_of(self, card: Card | None) -> list[str]:
        """Addresses of processes, beside the one with this card, that use its node's id."""
        found = self._registry.conflicts(self._clock.wall()) if card is not None else ()
        return [
            conflict.address
            for conflict in found
            if card is not None
            and conflict.node_id == card.node_id
            and conflict.address not in card.addresses
        ]

    def _reasons_against(self, target: Target) -> dict[str, str]:
        """Find the reasons against dialling addresses that only the peer's card names."""
        if target.card is None:
            return {}
        why_not = self._view.why_not_dial
        reasons = {way.address: why_not(way.address) for way in target.ways}
        return {address: reason for address, reason in reasons.items() if reason}

    async def _dial_all(self, ways: Sequence[Endpoint]) -> list[tuple[Endpoint, DialAttempt]]:
        dials = await asyncio.gather(*(self._dialler.dial(way.address) for way in ways))
        return list(zip(ways, dials, strict=True))

    def _with_card(self, target: Target, dials: Sequence[tuple[Endpoint, DialAttempt]]) -> Target:
        """Find the card of a node that was given by address, after it answered."""
        if target.card is not None:
            return target
        node_id = next((dial.node_id for _, dial in dials if dial.node_id), "")
        card = self._registry.get(node_id, mono=self._clock.mono()) if node_id else None
        if card is None:
            return replace(target, peer=replace(target.peer, node_id=node_id))
        peer = Peer(name=name_of(card), node_id=card.node_id, platform=card.platform)
        return replace(target, peer=peer, card=card)

    async def _judge_ways(
        self, dials: Sequence[tuple[Endpoint, DialAttempt]], peer: Peer
    ) -> list[Finding]:
        now, interfaces = self._clock.wall(), await asyncio.to_thread(self._machine.interfaces)
        cut = self._machine.cut_links(interfaces)
        is_member = self._view.identity() is not None
        works = any(dial.outcome is DialOutcome.ANSWERED for _, dial in dials)
        lines = []
        for way, dial in dials:
            host = way.address.rpartition(":")[0].strip("[]")
            needs_ping = (
                dial.outcome is DialOutcome.HOST_UNREACHABLE and self._machine.platform == "darwin"
            )
            link = machine_checks.link_to(host, interfaces)
            here = Here(
                platform=self._machine.platform,
                python=self._machine.program,
                is_member=is_member,
                link_to=link,
                is_cut=link in cut,
                pings=await self._machine.pings(host) if needs_ping else None,
            )
            line = way_checks.check_way(way, dial, peer, here, now=now, others_work=works)
            lines.append(line)
        return lines

    async def _ask_back(self, address: str, target: Target) -> list[Finding]:
        peer = target.peer
        request = pb.CheckBackRequest(
            addresses=self._own_addresses(address), sent_at_unix=self._clock.wall()
        )
        try:
            async with self._dialler.channel(address) as channel:
                answer = await DoctorServiceStub(channel).CheckBack(request, timeout=_BACK_S)
        except grpc.aio.AioRpcError as failure:
            return [_no_answer(failure, peer)]
        # The peer reads its clock last, so only the way back lies between the two readings.
        skew_s = answer.answered_at_unix - self._clock.wall()
        return self._judge_back(answer, skew_s, address, target)

    def _own_addresses(self, peer_address: str) -> list[str]:
        """List the addresses for the peer to dial; loopback only for a peer on this machine."""
        with_loopback = is_loopback(peer_address)
        addresses = [way.address for way in ways_of(self._registry.own)]
        return [a for a in addresses if with_loopback or not is_loopback(a)][:MAX_ADDRESSES]

    def _judge_back(
        self, answer: pb.CheckBackResponse, skew_s: float, address: str, target: Target
    ) -> list[Finding]:
        peer = target.peer
        here = Here(platform=self._machine.platform, python=self._machine.program)
        dials = [_from_wire(result, peer) for result in answer.dials]
        works = any(dial.outcome is DialOutcome.ANSWERED for dial in dials)
        found: list[Finding | None] = [
            way_checks.check_back(dial, peer, here, others_work=works)
            for dial in dials
            if dial.error != NOT_YOURS or not works
        ]
        own = self._registry.own
        theirs = Protocols(answer.protocol_min, answer.protocol_max)
        age_s = answer.caller_age_s if answer.caller_age_s >= 0 else None
        suspects = self._registry.suspects()
        found += [
            checks.check_skew(skew_s, own.ttl_s, peer),
            checks.check_protocol(
                Protocols(PROTOCOL_MIN, PROTOCOL_MAX), theirs, answer.version, peer
            ),
            checks.check_seen(age_s, own.ttl_s, address, peer),
            checks.check_suspicion(
                peer, of_them=peer.node_id in suspects, of_us=answer.is_caller_suspect
            ),
            checks.check_ring(
                own.ring_address, target.card.ring_address if target.card else "", peer
            ),
        ]
        rivals = [a for a in answer.conflicts if a not in self._registry.own_addresses]
        if rivals:
            found.append(
                checks.check_conflicts(
                    rivals,
                    data_dir=str(self._machine.data_dir),
                    has_given_way=self._registry.own_card.is_leaving,
                )
            )
        return [line for line in found if line is not None]


def check_own_address(dial: DialAttempt, me: Peer) -> Finding:
    """Judge a dial to an own address: this node must be the one that answers."""
    what = f"answers at {dial.address}"
    if dial.outcome is DialOutcome.ANSWERED and dial.node_id == me.node_id:
        return ok(what, f"this node does, after {dial.rtt_ms:.1f} ms")
    match dial.outcome:
        case DialOutcome.ANSWERED:
            detail = f"another node does: {dial.node_id}"
            command = shell("kakeya-node", "--advertise", "HOST:PORT")
        case DialOutcome.UNTRUSTED | DialOutcome.DENIED:
            detail = f"this node does not believe its own certificate: {dial.error}"
            command = JOIN
        case _:
            detail = f"this node's card says so, and it is not there: {dial.error}"
            command = shell("kakeya-node", "--bind", dial.address)
    return fault(what, detail, command)


def _no_answer(failure: grpc.aio.AioRpcError, peer: Peer) -> Finding:
    if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
        detail = f"{peer.name} cannot check back: its version knows no doctor"
        return warning("checked back", detail, UPDATE, on=peer.name, peer=peer.name)
    words = plain_details(failure.details() or "") or failure.code().name
    detail = f"{peer.name} was asked to check back and did not: {words}"
    return warning("checked back", detail, shell("kakeya", "doctor", peer.name), peer=peer.name)


def _from_wire(result: pb.DialResult, peer: Peer) -> DialAttempt:
    outcome = DialOutcome.ANSWERED if result.is_reached else outcome_of(result.errno, peer.platform)
    return DialAttempt(
        address=result.address,
        outcome=outcome,
        rtt_ms=result.rtt_ms,
        errno=result.errno,
        error=result.error,
    )
