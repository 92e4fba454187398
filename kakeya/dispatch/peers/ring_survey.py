"""The facts for the plan of a ring group, asked of all live nodes when a plan is wanted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kakeya.backends.ring.own_share import OwnShare
from kakeya.core.clock import Clock
from kakeya.core.errors import InvalidArgument, KakeyaError, NotFound, UnknownMethod
from kakeya.core.figures import Json
from kakeya.core.settings import nearest
from kakeya.core.units import MIB
from kakeya.dispatch.peers.client import PeerCalls
from kakeya.dispatch.peers.ring_wire import ShareReport, report_from_wire, report_to_wire
from kakeya.fleet.cards.cards import Card
from kakeya.fleet.paths.connect_time import connect_rtt_s
from kakeya.fleet.paths.link_rates import LOOPBACK
from kakeya.fleet.placement.ring import RingSplit
from kakeya.fleet.placement.ring_plan import RingPlan, plan_ring
from kakeya.fleet.placement.ring_speed import (
    UNMEASURED_RTT_S,
    RingCable,
    RingNode,
    RingWeights,
)
from kakeya.prefix.peers.peers import Neighbourhood
from kakeya.v1 import serving_pb2 as pb
from kakeya.wire.channels import is_local

SURVEY_S = 5.0
"""How long a node may take to tell: it reads headers of weights, and measures links."""
NOT_NAMED = "it was not named"
_MEASURE_S = 3.5
"""Of that for all links: those that are left keep what is expected of them."""
_MOST_SURVEYED = 32
_PROBE_S = 2.0
_PROBE, _MOST_PROBE = 2 * MIB, 4 * MIB
"""Of a link of 1 Gbit/s 20 ms: well above the time of a call."""
_LEAST_S = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class RingOutlook:
    """A plan, and the nodes and links that it was made from."""

    plan: RingPlan
    nodes: tuple[RingNode, ...]
    cables: tuple[RingCable, ...]

    def to_json(self) -> Json:
        """As GET /api/v1/ring/plan answers."""
        plan = self.plan
        return {
            "object": "ring_plan",
            "model": plan.model_id,
            "reason_refused": plan.reason_refused,
            "backend": plan.backend or None,
            "split": plan.split.value if plan.members else None,
            "members": [
                {
                    "rank": one.rank,
                    "node_id": one.node_id,
                    "label": one.label,
                    "address": one.address,
                    "layers": one.layers,
                    "lend_mb": -(-one.lend_bytes // MIB),
                }
                for one in plan.members
            ],
            "tokens_per_second": round(plan.tokens_per_second, 2),
            "prefill_tokens_per_second": round(plan.prefill_tokens_per_second, 1),
            "collectives_per_token": plan.speed.waits,
            "sent_bytes_per_token": plan.speed.sent_bytes,
            "alone": {"label": plan.alone_on, "tokens_per_second": plan.alone_tokens_per_second}
            if plan.alone_on
            else None,
            "nodes": [
                {
                    "node_id": one.node_id,
                    "label": one.label,
                    "can_lend_mb": one.lend_bytes // MIB,
                    "speed_from": one.speed_from,
                    "refusal": one.refusal or None,
                }
                for one in self.nodes
            ],
            "links": [
                {
                    "node_ids": [one.a, one.b],
                    "network": one.network or None,
                    "rtt_ms": round(one.rtt_s * 1000, 3),
                    "bytes_per_second": round(one.bytes_per_s),
                }
                for one in self.cables
            ],
        }


class RingSurvey:
    """See the module. `draining` says why this node takes nothing new, "" = it does."""

    def __init__(
        self, plane: Neighbourhood, own: OwnShare, clock: Clock, draining: Callable[[], str]
    ) -> None:
        self._plane = plane
        self._own = own
        self._clock = clock
        self._draining = draining

    async def describe(self, request: pb.DescribeShareRequest) -> pb.DescribeShareResponse:
        """Answer another node. A model that is not here, or cannot be shared, is left out."""
        if request.probe_bytes:
            return pb.DescribeShareResponse(probe=bytes(min(request.probe_bytes, _MOST_PROBE)))
        weights = None
        if request.model_id:
            try:
                weights = await self._own.weights(request.model_id, takes_paths=False)
            except (NotFound, InvalidArgument):
                weights = None
        return report_to_wire(await self._report(weights, list(request.node_ids)))

    async def plan(
        self, model: str, *, named: Sequence[str] = (), split: RingSplit | None = None
    ) -> RingOutlook:
        """Plan a group for a model, by a name that a node knows, or by its folder here.

        `named` are labels, ids or beginnings of ids of the nodes to use, () = all live ones.

        Raises NotFound, InvalidArgument.
        """
        own, *peers = self._plane.registry.snapshot(mono=self._clock.mono())[:_MOST_SURVEYED]
        cards = [own, *peers]
        members = {one.node_id for one in cards}
        if named:
            members = {_find(name, cards).node_id for name in named}
        try:
            weights, missing = await self._own.weights(model, takes_paths=True), None
        except NotFound as unknown:
            weights, missing = None, unknown
        ids = [one.node_id for one in cards]
        own_report, *told = await asyncio.gather(
            self._report(weights, ids), *(self._ask(card, model, ids) for card in peers)
        )
        reports = [own_report, *told]
        known = (one.weights for one in reports if isinstance(one, ShareReport) and one.weights)
        weights = weights or next(known, None)
        if weights is None:
            raise NotFound(f"{missing.message if missing else model}; and no live peer has it")
        nodes = [
            self._node(card, report, is_member=card.node_id in members)
            for card, report in zip(cards, reports, strict=True)
        ]
        told_by = [one for one in reports if isinstance(one, ShareReport)]
        cables = _slowest([cable for report in told_by for cable in report.cables])
        plan = await asyncio.to_thread(
            plan_ring, weights, nodes, cables, leader=own.node_id, split=split
        )
        return RingOutlook(plan=plan, nodes=tuple(nodes), cables=tuple(cables))

    async def _report(self, weights: RingWeights | None, node_ids: Sequence[str]) -> ShareReport:
        share = await self._own.describe()
        suspects = self._plane.registry.suspects()
        cards = self._plane.registry.live_peers(mono=self._clock.mono())
        cables: list[RingCable] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MEASURE_S):
                # One after the other: at once, they would share this node's own link.
                for card in sorted(cards, key=lambda one: one.node_id in suspects):
                    if card.node_id in node_ids[:_MOST_SURVEYED]:
                        cables += filter(None, [await self._measure(card)])
        return ShareReport(share=share, weights=weights, cables=tuple(cables))

    async def _measure(self, card: Card) -> RingCable | None:
        address = self._plane.routes.address_for(card)
        if not address or self._plane.why_not_dial(address):
            return None
        way = next((one for one in card.endpoints if one.address == address), None)
        network = LOOPBACK if is_local(address) else way.network if way else ""
        rtt_s = await asyncio.to_thread(connect_rtt_s, address)
        rate = 0.0 if rtt_s is None else await self._rate(card, address)
        return RingCable(
            a=self._plane.registry.node_id,
            b=card.node_id,
            rtt_s=UNMEASURED_RTT_S if rtt_s is None else rtt_s,
            bytes_per_s=rate or self._plane.links.expected(card.node_id, network),
            network=network,
        )

    async def _rate(self, card: Card, address: str) -> float:
        """The bytes/s at which a peer's answers come; 0 = it cannot be told."""
        calls = PeerCalls(self._plane.channels.get(address, card.node_id), card.label)
        times = []
        try:
            for size in (1, 1, _PROBE):  # the first one may have to connect
                began = self._clock.mono()
                await calls.probe(size, _PROBE_S)
                times.append(self._clock.mono() - began)
        except KakeyaError:
            return 0.0
        seconds = times[2] - times[1]
        return _PROBE / seconds if seconds > _LEAST_S else 0.0

    async def _ask(self, card: Card, model: str, node_ids: Sequence[str]) -> ShareReport | str:
        """Ask a peer; a text says why it does not tell."""
        address = self._plane.routes.address_for(card)
        if why := self._plane.why_not_dial(address):
            return why
        name = card.label or card.node_id
        calls = PeerCalls(self._plane.channels.get(address, card.node_id), name)
        try:
            message = await calls.describe_share(model, node_ids, SURVEY_S)
            return report_from_wire(message, card.node_id, model, name)
        except UnknownMethod:
            return "it runs an older build, which forms no groups"
        except KakeyaError as failure:
            return failure.message.removeprefix(f"{name}: ")

    def _node(self, card: Card, report: ShareReport | str, *, is_member: bool) -> RingNode:
        refusal = "" if is_member else NOT_NAMED
        if isinstance(report, str):
            share, refusal = None, report
        else:
            share = report.share
        if card.node_id == self._plane.registry.node_id:
            refusal = refusal or self._draining()
        return RingNode(
            node_id=card.node_id,
            label=card.label or card.node_id,
            address=self._plane.routes.address_for(card),
            lend_bytes=share.lend_bytes if share else 0,
            weights_per_s=share.weights_per_s if share else 1.0,
            products_per_s=share.products_per_s if share else 1.0,
            speed_from=share.speed_from if share else "assumed",
            has_thunderbolt5=share is not None and share.has_thunderbolt5,
            refusal=refusal,
        )


def _slowest(cables: Sequence[RingCable]) -> list[RingCable]:
    """One cable for each two nodes: of what both ends measured, the slower."""
    found: dict[frozenset[str], RingCable] = {}
    for cable in cables:
        pair = frozenset((cable.a, cable.b))
        known = found.get(pair)
        if known is None or (cable.rtt_s, -cable.bytes_per_s) > (known.rtt_s, -known.bytes_per_s):
            found[pair] = cable
    return list(found.values())


def _find(name: str, cards: Sequence[Card]) -> Card:
    """The node of a name. Raises NotFound, InvalidArgument."""
    for matches in (
        [card for card in cards if name in (card.node_id, card.label)],
        [card for card in cards if name and card.node_id.startswith(name)],
    ):
        if len(matches) > 1:
            ids = ", ".join(card.node_id for card in matches)
            raise InvalidArgument(f"{name!r} names {len(matches)} nodes: {ids}; give more of one")
        if matches:
            return matches[0]
    labels = [card.label or card.node_id for card in cards]
    raise NotFound(
        f"no live node is called {name[:80]!r}{nearest(name[:80], labels)}; there are "
        f"{', '.join(labels)}"
    )
