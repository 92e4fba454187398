"""DoctorService: the other half of `kakeya doctor`, what a caller cannot see of itself.

This node dials for the caller, so it must not become a tool against others: only addresses at the
IP that the call came from, or on the caller's own card where its certificate says who it is; few,
briefly, one check at a time for each caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import unquote

import grpc
import grpc.aio

from kakeya.core.clock import Clock
from kakeya.core.errors import InvalidArgument, KakeyaError, Refused
from kakeya.fleet.addresses import Ip, Literal, read_literal
from kakeya.fleet.cards import PROTOCOL_MAX, PROTOCOL_MIN, Card
from kakeya.fleet.registry import CapabilityRegistry
from kakeya.node.doctor.dials import Dial, Dialler, Outcome
from kakeya.v1 import fleet_pb2 as pb
from kakeya.v1.fleet_pb2_grpc import DoctorServiceServicer
from kakeya.wire.authorization import current_caller
from kakeya.wire.security import Caller
from kakeya.wire.status import abort

MAX_ADDRESSES = 8
MAX_CHECKS = 8
"""At once, of all callers together."""
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
        self._busy.add(name)
        try:
            yield
        finally:
            self._busy.discard(name)

    async def _dial_all(
        self, addresses: Sequence[str], caller: Caller, source: Literal | None
    ) -> list[Dial]:
        card = self._registry.get(caller.node_id, mono=self._clock.mono())
        return await asyncio.gather(
            *(self._dial(address, card, source) for address in dict.fromkeys(addresses))
        )

    async def _dial(self, address: str, card: Card | None, source: Literal | None) -> Dial:
        target, reason = choose_target(address, card, source, self._may_dial)
        if not target:
            return Dial(address=address, outcome=Outcome.FAILED, error=reason)
        dial = await self._dialler.dial(target)
        return Dial(
            address=address,
            outcome=dial.outcome,
            rtt_ms=dial.rtt_ms,
            errno=dial.errno,
            error=dial.error,
            node_id=dial.node_id,
        )

    def _answer(self, node_id: str, dials: Sequence[Dial]) -> pb.CheckBackResponse:
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


def choose_target(
    address: str, card: Card | None, source: Literal | None, may_dial: Callable[[str], str]
) -> tuple[str, str]:
    """Return what to dial for a caller that names an address, or "" and the reason why not.

    A zone in an address means an interface of the caller; the one that the call came in by is
    ours, and takes its place.
    """
    wanted = read_literal(address)
    if wanted is None:
        return "", "not dialled: it is no IP address with a port"
    if source is not None and _bare(wanted.ip) == _bare(source.ip):
        return str(Literal(_bare(source.ip), wanted.port, source.zone)), ""
    on_card = card is not None and (
        address == card.grpc_address or any(way.address == address for way in card.endpoints)
    )
    if not on_card:
        return "", NOT_YOURS
    reason = may_dial(address)
    return ("", f"not dialled: {reason}") if reason else (address, "")


NOT_YOURS = "not dialled: the call did not come from it, and it is not on the caller's card"


def _bare(ip: Ip) -> Ip:
    mapped = ip.ipv4_mapped if ip.version == 6 else None
    return mapped or ip


def _to_wire(dial: Dial) -> pb.DialResult:
    return pb.DialResult(
        address=dial.address,
        is_reached=dial.outcome is Outcome.ANSWERED,
        rtt_ms=dial.rtt_ms,
        error=dial.error,
        errno=dial.errno,
    )
