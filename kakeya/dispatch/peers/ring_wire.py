"""What nodes tell each other for the plan of a ring group, as messages of ServingService."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from kakeya.backends.ring.own_share import NodeShare
from kakeya.core.errors import PeerProtocol
from kakeya.fleet.placement.ring_speed import RingCable, RingWeights
from kakeya.v1 import serving_pb2 as pb

_SOURCES = ("measured", "chip", "assumed")
_LEAST_SPEED, _MOST_SPEED = 1e3, 1e18
_MOST_RTT_S, _MOST_LAYERS = 60.0, 10_000
_WEIGHT_FIELDS = tuple(one.name for one in fields(RingWeights) if one.name != "model_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareReport:
    """A node's share, the facts of a model where it has it, and its links to others."""

    share: NodeShare
    weights: RingWeights | None = None
    cables: tuple[RingCable, ...] = ()


def report_to_wire(report: ShareReport) -> pb.DescribeShareResponse:
    """The message of a report."""
    share, weights = report.share, None
    if report.weights is not None:
        told = {name: getattr(report.weights, name) for name in _WEIGHT_FIELDS}
        weights = pb.RingWeightFacts(**told)
    return pb.DescribeShareResponse(
        lend_bytes=share.lend_bytes,
        weights_per_second=share.weights_per_s,
        products_per_second=share.products_per_s,
        speed_from=share.speed_from,
        has_thunderbolt5=share.has_thunderbolt5,
        weights=weights,
        links=[
            pb.MeasuredLink(
                node_id=cable.b,
                network=cable.network,
                rtt_seconds=cable.rtt_s,
                bytes_per_second=cable.bytes_per_s,
            )
            for cable in report.cables
        ],
    )


def report_from_wire(
    message: pb.DescribeShareResponse, node_id: str, model_id: str, name: str
) -> ShareReport:
    """The report of a node in its message. Raises PeerProtocol, which calls the node by `name`."""
    weights = None
    if message.HasField("weights"):
        told = message.weights
        weights = RingWeights(
            model_id=model_id, **{name: getattr(told, name) for name in _WEIGHT_FIELDS}
        )
        counts = (weights.layers, weights.layer_bytes, weights.read_bytes, weights.products)
        heads = (weights.heads, weights.kv_heads, weights.hidden_size, weights.value_bytes)
        if min(*counts, *heads) < 1 or weights.layers > _MOST_LAYERS:
            raise PeerProtocol(f"{name}: its facts of {model_id} are of no model")
    return ShareReport(
        share=NodeShare(
            lend_bytes=message.lend_bytes,
            weights_per_s=_speed(message.weights_per_second),
            products_per_s=_speed(message.products_per_second),
            speed_from=message.speed_from if message.speed_from in _SOURCES else "assumed",
            has_thunderbolt5=message.has_thunderbolt5,
        ),
        weights=weights,
        cables=tuple(
            RingCable(
                a=node_id,
                b=link.node_id,
                rtt_s=min(max(0.0, link.rtt_seconds), _MOST_RTT_S),
                bytes_per_s=_speed(link.bytes_per_second),
                network=link.network,
            )
            for link in message.links
            if not math.isnan(link.rtt_seconds)
        ),
    )


def _speed(told: float) -> float:
    return min(max(_LEAST_SPEED, told), _MOST_SPEED)  # of NaN the least
