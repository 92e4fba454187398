"""DoctorService: a node checks, for a peer that runs `kakeya doctor`, how the peer is reached.

This node dials addresses for its caller, so it must not become a tool for attacks. It dials only
addresses that gossip may dial: at the IP of the call, or on the caller's card if a certificate
proves its id. Dials are few and short, with one check at a time and a bound per minute for each
caller.

    the IP of the call    the answer tells all: the caller is there
    others on the card    a card may name any address, so the answer tells only whether the caller
                          itself answers there, and takes equally long in all other cases
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple
from urllib.parse import unquote

import grpc
import grpc.aio

from kakeya.core.clock import Clock
from kakeya.core.errors import InvalidArgument, KakeyaError, Refused
from kakeya.doctor.dials import DialAttempt, Dialler, DialOutcome
from kakeya.fleet.cards.cards import PROTOCOL_MAX, PROTOCOL_MIN, Card
from kakeya.fleet.liveness.pacing import Shares
from kakeya.fleet.paths.addresses import Ip, Literal, read_literal
from kakeya.fleet.view.registry import CapabilityRegistry
from kakeya.v1 import fleet_pb2 as pb
from kakeya.v1.fleet_pb2_grpc import DoctorServiceServicer
from kakeya.wire.security import Caller
from kakeya.wire.server.authorization import current_caller
from kakeya.wire.status import abort

MAX_ADDRESSES = 8
MAX_CHECKS = 8
"""Checks at the same time, of all callers together."""
MAX_DIALS, MAX_DIALS_EACH, DIALS_IN_S = 128, 32, 60.0
"""Addresses dialled in a minute, for all callers and for one, which allows four checks."""
QUIET_S = 2.0
"""The time of an answer about a card's address where the caller does not answer. A refusal takes
as long as silence, so that the answer does not tell them apart."""
Context = grpc.aio.ServicerContext[pb.CheckBackRequest, pb.CheckBackResponse]


class CheckBackService(DoctorServiceServicer):
    """Answers a caller with this node's view of it."""

    def __init__(
        self,
        registry: CapabilityRegistry,
        *,
        clock: Clock,
        dialler: Dialler,
        may_dial: Callable[[str], str],
        version: str,
        caller: Callable[[], Caller] = current_caller,
    ) -> None:
        """`may_dial` is the policy for addresses of cards: it returns "" or the reason against."""
        self._registry = registry
        self._clock = clock
        self._dialler = dialler
        self._may_dial = may_dial
        self._version = version
        self._caller = caller
        self._busy: set[str] = set()
        self._dials = Shares(MAX_DIALS, DIALS_IN_S, share=MAX_DIALS_EACH)

    async def CheckBack(
        self, request: pb.CheckBackRequest, context: Context
    ) -> pb.CheckBackResponse:
        """Dial the caller's addresses, and answer with the results and this node's facts of it."""
        try:
            caller = self._caller()
            source = source_of(caller.address)
            with self._turn(caller, source, len(request.addresses)):
                dials = await self._dial_all(request.addresses, caller, source)
        except KakeyaError as refusal:
            await abort(context, refusal)
            raise
        answered = next((dial.node_id for dial in dials if dial.node_id), "")
        return self._answer(caller.node_id or answered, dials)

    @contextmanager
    def _turn(self, caller: Caller, source: Literal | None, count: int) -> Iterator[None]:
        if count > MAX_ADDRESSES:
            raise InvalidArgument(
                f"{count} addresses are too many to dial; give at most {MAX_ADDRESSES}",
                param="addresses",
            )
        name = caller.node_id or (str(source.ip) if source else "")
        if name in self._busy or len(self._busy) >= MAX_CHECKS:
            raise Refused(
                "this node already checks back for you or for many others; ask again in some "
                "seconds",
                retry_after_s=3.0,
            )
        mono = self._clock.mono()
        if not all(self._dials.take(name, mono) for _ in range(count)):
            raise Refused(
                f"this node dials back {MAX_DIALS_EACH} addresses in {DIALS_IN_S:g} s for one "
                f"caller and {MAX_DIALS} for all; ask again later",
                retry_after_s=DIALS_IN_S,
            )
        self._busy.add(name)
        try:
            yield
        finally:
            self._busy.discard(name)

    async def _dial_all(
        self, addresses: Sequence[str], caller: Caller, source: Literal | None
    ) -> list[DialAttempt]:
        started_mono = self._clock.mono()
        card = self._registry.get(caller.node_id, mono=started_mono)
        dials = await asyncio.gather(
            *(self._dial(address, card, source) for address in dict.fromkeys(addresses))
        )
        if any(dial.error == NOT_TOLD for dial in dials):
            await self._clock.sleep(started_mono + QUIET_S - self._clock.mono())
        return dials

    async def _dial(self, address: str, card: Card | None, source: Literal | None) -> DialAttempt:
        target = choose_target(address, card, source, self._may_dial)
        if not target.address:
            return DialAttempt(address=address, outcome=DialOutcome.FAILED, error=target.reason)
        if target.is_source or card is None:
            return replace(await self._dialler.dial(target.address), address=address)
        try:
            async with asyncio.timeout(QUIET_S):
                dial = await self._dialler.dial(target.address)
        except TimeoutError:
            dial = None
        if (
            dial is not None
            and dial.outcome is DialOutcome.ANSWERED
            and dial.node_id == card.node_id
        ):
            return dial
        return DialAttempt(address=address, outcome=DialOutcome.FAILED, error=NOT_TOLD)

    def _answer(self, node_id: str, dials: Sequence[DialAttempt]) -> pb.CheckBackResponse:
        now, mono = self._clock.wall(), self._clock.mono()
        age_s = self._registry.age_s(node_id, mono=mono) if node_id else None
        return pb.CheckBackResponse(
            node_id=self._registry.node_id,
            label=self._registry.own.label,
            answered_at_unix=now,
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            version=self._version,
            dials=[_to_wire(dial) for dial in dials],
            caller_age_s=-1.0 if age_s is None else age_s,
            is_caller_suspect=bool(node_id) and self._registry.is_suspect(node_id),
            conflicts=[
                conflict.address
                for conflict in self._registry.conflicts(now)
                if conflict.node_id == node_id
            ],
        )


def source_of(peer: str) -> Literal | None:
    """Parse the origin of a call as gRPC writes it; None for a unix socket."""
    kind, _, address = peer.partition(":")
    return read_literal(unquote(address)) if kind in ("ipv4", "ipv6") else None


class BackTarget(NamedTuple):
    """The address to dial for a caller; `address` "" = none, for the given reason."""

    address: str
    reason: str = ""
    is_source: bool = False
    """Whether the call came from that IP."""


def choose_target(
    address: str, card: Card | None, source: Literal | None, may_dial: Callable[[str], str]
) -> BackTarget:
    """Choose the address to dial for a caller that names an address.

    A zone in an address names an interface of the caller; it is replaced by the own interface on
    which the call arrived.
    """
    wanted = read_literal(address)
    if wanted is None:
        return BackTarget("", "not dialled: it is no IP address with a port")
    is_source = source is not None and _bare(wanted.ip) == _bare(source.ip)
    on_card = card is not None and address in card.addresses
    if source is not None and is_source:
        address = str(Literal(_bare(source.ip), wanted.port, source.zone))
    elif not on_card:
        return BackTarget("", NOT_YOURS)
    reason = may_dial(address)
    return (
        BackTarget("", f"not dialled: {reason}") if reason else BackTarget(address, "", is_source)
    )


NOT_YOURS = "not dialled: the call did not come from it, and it is not on the caller's card"
NOT_TOLD = (
    "the caller does not answer there; why is told only of the address that a call comes from"
)


def _bare(ip: Ip) -> Ip:
    mapped = ip.ipv4_mapped if ip.version == 6 else None
    return mapped or ip


def _to_wire(dial: DialAttempt) -> pb.DialResult:
    return pb.DialResult(
        address=dial.address,
        is_reached=dial.outcome is DialOutcome.ANSWERED,
        rtt_ms=dial.rtt_ms,
        error=dial.error,
        errno=dial.errno,
    )
