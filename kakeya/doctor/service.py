"""DoctorService: the other half of `kakeya doctor`, what a caller cannot see of itself.

This node dials for the caller, so it must not become a tool against others: only addresses that
gossip may dial, at the IP that the call came from or on the caller's own card where its certificate
says who it is; few, briefly, one check at a time for each caller, so many in a minute.

    the call's own IP     tells all: the caller sits there
    others on the card    anybody can write any address on a card, so it tells only whether the
                          caller itself answers there, and takes as long whatever else is there
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
"""At once, of all callers together."""
MAX_DIALS, MAX_DIALS_EACH, DIALS_IN_S = 128, 32, 60.0
"""Addresses dialled in a minute, for all callers and for one: a person who looks four times."""
QUIET_S = 2.0
"""How long the answer takes when an address other than the call's own does not answer: no less
when it refuses than when it is silent."""
Context = grpc.aio.ServicerContext[pb.CheckBackRequest, pb.CheckBackResponse]


class CheckBackService(DoctorServiceServicer):
    """Answers how this node sees its caller."""

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
        """`may_dial` is the policy for addresses of cards: "" or the reason against one."""
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
        """Dial the caller's addresses and tell what this node holds of it."""
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
    """Read where a call came from, as gRPC writes it; None for a unix socket."""
    kind, _, address = peer.partition(":")
    return read_literal(unquote(address)) if kind in ("ipv4", "ipv6") else None


class BackTarget(NamedTuple):
    """What to dial for a caller; `address` "" = nothing, for the reason given."""

    address: str
    reason: str = ""
    is_source: bool = False
    """Whether the call came from that IP."""


def choose_target(
    address: str, card: Card | None, source: Literal | None, may_dial: Callable[[str], str]
) -> BackTarget:
    """Choose what to dial for a caller that names an address.

    A zone in an address means an interface of the caller; the one that the call came in by is
    ours, and takes its place.
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
