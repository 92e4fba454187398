"""How fast a ring group would be: what each rank computes, and how long it waits for the others.

    decode      each rank reads its share of the weights once a token, at the speed at which its
                node reads weights when it decodes
    prefill     each rank multiplies its share by each token, at its node's measured speed
    waiting     a collective of n ranks goes around a ring: 2 (n - 1) hops, each half a round trip
                and 1/n of the bytes over the link and through a core, COLLECTIVE_S, and
                between two steps of a forward DRIFT_S

A tensor split has two collectives a layer, which compute at the same time: the slowest rank counts.
In a pipeline the ranks compute one after the other, so it saves memory and no time. Seconds, bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kakeya.core.units import MIB

COLLECTIVE_S = 15e-6
"""Of each collective, beside the link's time: threads of both ends are woken."""
HANDLED_BYTES_PER_S = 600e6
"""The bytes that a core copies through sockets and adds, beside the link's time. Both were measured
on a small Linux machine; on a Mac neither was yet."""
DRIFT_S = 0.3e-3
"""Of each collective of a forward: ranks come to it at different times, and a part of their work
is no weight and not divided. The middle of `benchmarks.ring_plan` there, for 16 layers."""
PIECE_TOKENS = 64
"""Tokens of a prompt that one forward of a group takes: its ranks have timed no larger ones."""
UNMEASURED_RTT_S = 0.5e-3
UNMEASURED_BYTES_PER_S = 40 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class RingNode:
    """What a node can give to a group. Speeds are above 0.

    `weights_per_s` are bytes of weights that its decoding reads, `products_per_s` weights times
    tokens that its prefill multiplies. `refusal` says why it cannot be a member, "" = it can.
    """

    node_id: str
    label: str
    address: str
    lend_bytes: int
    weights_per_s: float
    products_per_s: float
    speed_from: str = "measured"
    """"measured", "chip" = by its name, "assumed"."""
    has_thunderbolt5: bool = False
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingCable:
    """A link between two nodes, both ways alike; `network` as in `Endpoint`."""

    a: str
    b: str
    rtt_s: float = UNMEASURED_RTT_S
    bytes_per_s: float = UNMEASURED_BYTES_PER_S
    network: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingWeights:
    """The facts of a model that a split needs.

    `layer_bytes` is what the largest layer takes in memory, with KV; `shared_bytes` what each rank
    holds, whatever its share: embedding, output layer, norms. `read_bytes` are read for a token, of
    all layers, and `head_bytes` of the output layer; `products` are the weights that a token is
    multiplied by, of all layers. `value_bytes` are those of one number between two layers.
    """

    model_id: str
    kind: str
    """The model_type of its config."""
    layers: int
    layer_bytes: int
    shared_bytes: int
    read_bytes: int
    head_bytes: int
    products: int
    heads: int
    kv_heads: int
    hidden_size: int
    value_bytes: int
    has_tensor: bool
    has_pipeline: bool

    @property
    def whole_bytes(self) -> int:
        """All of the model in memory."""
        return self.layers * self.layer_bytes + self.shared_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSpeed:
    """A prediction; `waits` are collectives a token, `sent_bytes` leave each rank a token."""

    tokens_per_second: float
    prefill_tokens_per_second: float
    waits: int = 0
    sent_bytes: int = 0


NO_SPEED = RingSpeed(tokens_per_second=0.0, prefill_tokens_per_second=0.0)


def alone(weights: RingWeights, node: RingNode) -> RingSpeed:
    """The speed of one node that holds all of the model."""
    return RingSpeed(
        tokens_per_second=node.weights_per_s / (weights.read_bytes + weights.head_bytes),
        prefill_tokens_per_second=node.products_per_s / weights.products,
    )


def of_tensor(
    weights: RingWeights, ranks: Sequence[RingNode], around: Sequence[RingCable]
) -> RingSpeed:
    """The speed of a tensor split over these ranks; `around` are the links from rank to rank."""
    count = len(ranks)
    row = weights.hidden_size * weights.value_bytes
    waits = 2 * weights.layers + 1  # the selected token is agreed on too
    read = weights.read_bytes / count + weights.head_bytes
    token_s = max(read / node.weights_per_s for node in ranks)
    token_s += waits * (sum_s(around, row) + DRIFT_S)
    work = PIECE_TOKENS * weights.products / count
    piece_s = max(work / node.products_per_s for node in ranks)
    piece_s += 2 * weights.layers * (sum_s(around, row * PIECE_TOKENS) + DRIFT_S)
    return RingSpeed(
        tokens_per_second=1 / token_s,
        prefill_tokens_per_second=PIECE_TOKENS / piece_s,
        waits=waits,
        sent_bytes=round(waits * row * 2 * (count - 1) / count),
    )


def of_pipeline(
    weights: RingWeights,
    ranks: Sequence[RingNode],
    layers: Sequence[int],
    around: Sequence[RingCable],
) -> RingSpeed:
    """The speed of a pipeline with so many layers at each rank."""
    count = len(ranks)
    row = weights.hidden_size * weights.value_bytes
    hops = around[:-1]
    share = [each / weights.layers for each in layers]
    token_s = sum(
        part * weights.read_bytes / node.weights_per_s
        for part, node in zip(share, ranks, strict=True)
    )
    token_s += weights.head_bytes / min(node.weights_per_s for node in ranks)
    # To the next rank each, then from all to all, then the sum of the selected token.
    token_s += sum(_hop_s(link, row) for link in hops) + len(hops) * COLLECTIVE_S
    token_s += _gather_s(around, row) + sum_s(around, 4) + (count + 1) * DRIFT_S
    piece_s = sum(
        PIECE_TOKENS * part * weights.products / node.products_per_s
        for part, node in zip(share, ranks, strict=True)
    )
    piece_s += sum(_hop_s(link, row * PIECE_TOKENS) for link in hops) + len(hops) * COLLECTIVE_S
    piece_s += _gather_s(around, row * PIECE_TOKENS) + count * DRIFT_S
    return RingSpeed(
        tokens_per_second=1 / token_s,
        prefill_tokens_per_second=PIECE_TOKENS / piece_s,
        waits=count + 1,
        sent_bytes=count * row,
    )


def _hop_s(link: RingCable, size: float) -> float:
    return link.rtt_s / 2 + size / link.bytes_per_s + size / HANDLED_BYTES_PER_S


def sum_s(around: Sequence[RingCable], size: int) -> float:
    """The seconds of an all-reduce: the slowest hop of the ring counts at each step."""
    count = len(around)
    return COLLECTIVE_S + 2 * (count - 1) * max(_hop_s(link, size / count) for link in around)


def _gather_s(around: Sequence[RingCable], size: int) -> float:
    """An all-gather."""
    return COLLECTIVE_S + (len(around) - 1) * max(_hop_s(link, size) for link in around)
