"""The plan of a ring group: which nodes, in which order, with which share of a model, how fast.

    tensor      each rank has an equal share of each layer: the ranks must divide the heads and the
                KV heads, and each node must be able to lend a share
    pipeline    whole layers, as many as each node can lend in proportion, less MARGIN_BYTES a rank

All groups of up to MOST_NODES nodes are compared, and the one with the most predicted tokens/s is
the plan. A group that would be slower than one node that can hold the model is refused, as a group
costs speed and buys memory only. Pure: equal facts give an equal plan, in any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from kakeya.core.units import MIB
from kakeya.fleet.placement.ring import RingSplit
from kakeya.fleet.placement.ring_speed import (
    NO_SPEED,
    RingCable,
    RingNode,
    RingSpeed,
    RingWeights,
    alone,
    of_pipeline,
    of_tensor,
)

MARGIN_BYTES = 512 * MIB
"""What a rank lends beside its share: its process, and room to compute in."""
MOST_NODES = 10
"""Nodes that are considered, those that can lend the most; a shelf has no more."""
SLOWER = "slower"
"""The code of a refusal of a group that could run; its plan has members and speeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingMember:
    """One rank of a planned group.

    `layers` are whole ones of a pipeline, where rank 0 has the last layers; in a tensor split each
    rank has a part of all of them. `lend_bytes` is the memory that the node must lend.
    """

    node_id: str
    label: str
    address: str
    rank: int
    layers: int
    lend_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RingPlan:
    """The group for a model, or why there is none: `reason_refused` is "" exactly when the group
    should be started. A group that could run, but slower than one node, still has members.

    `alone_on` is the label of the fastest node that can hold the model by itself, "" = none can.
    """

    model_id: str
    members: tuple[RingMember, ...] = ()
    backend: str = ""
    """"ring" or "jaccl"."""
    split: RingSplit = RingSplit.TENSOR
    speed: RingSpeed = NO_SPEED
    alone_on: str = ""
    alone_tokens_per_second: float = 0.0
    reason_refused: str = ""

    @property
    def tokens_per_second(self) -> float:
        """Predicted for one request that decodes."""
        return self.speed.tokens_per_second

    @property
    def prefill_tokens_per_second(self) -> float:
        """Predicted for a prompt."""
        return self.speed.prefill_tokens_per_second

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers by rank, as `--layers` of a pipeline."""
        return tuple(member.layers for member in self.members)


class _NodeLinks:
    """The links between nodes, in both directions alike."""

    def __init__(self, links: Sequence[RingCable]) -> None:
        self._by_pair = {frozenset((link.a, link.b)): link for link in sorted(links, key=repr)}

    def between(self, a: str, b: str) -> RingCable:
        found = self._by_pair.get(frozenset((a, b)))
        return found or RingCable(a=a, b=b)

    def around(self, ranks: Sequence[RingNode]) -> list[RingCable]:
        """From each rank to the next one, and from the last one to the first."""
        ids = [node.node_id for node in ranks]
        return [self.between(a, b) for a, b in zip(ids, (*ids[1:], ids[0]), strict=True)]

    def all_of(self, ranks: Sequence[RingNode]) -> Iterator[RingCable]:
        for a, b in combinations(ranks, 2):
            yield self.between(a.node_id, b.node_id)


def plan_ring(
    weights: RingWeights,
    nodes: Sequence[RingNode],
    links: Sequence[RingCable] = (),
    *,
    leader: str = "",
    split: RingSplit | None = None,
) -> RingPlan:
    """Plan a group of these nodes. The node `leader`, if it is a member, is rank 0; `split` None =
    the faster one. Nodes that cannot be members (`refusal`) may still hold the model alone."""
    single = _best_alone(weights, nodes)
    plan = RingPlan(model_id=weights.model_id)
    if single is not None:
        told = alone(weights, single).tokens_per_second
        plan = replace(plan, alone_on=single.label, alone_tokens_per_second=told)
    able = sorted(
        (node for node in nodes if not node.refusal), key=lambda one: (-one.lend_bytes, one.node_id)
    )[:MOST_NODES]
    if len(able) < 2:
        return replace(plan, reason_refused=_too_few(nodes, able))
    known = _NodeLinks(links)
    groups = [
        found
        for count in range(2, len(able) + 1)
        for chosen in combinations(able, count)
        for found in _groups(plan, weights, _in_order(chosen, known, leader), known, split)
    ]
    if not groups:
        return replace(plan, reason_refused=_why_none(weights, able, split))
    best = min(groups, key=_preference)
    if single is not None and plan.alone_tokens_per_second >= best.tokens_per_second:
        best = replace(
            best,
            reason_refused=f"{plan.alone_on} can hold {weights.model_id} alone, at about "
            f"{plan.alone_tokens_per_second:.1f} tokens/s; the group of {len(best.members)} would "
            f"have about {best.tokens_per_second:.1f}. Serve it there",
        )
    return best


def _preference(plan: RingPlan) -> tuple[float, int, str, tuple[str, ...]]:
    """The best first, and no two alike."""
    ids = tuple(member.node_id for member in plan.members)
    return -plan.tokens_per_second, len(ids), plan.split, ids


def _best_alone(weights: RingWeights, nodes: Sequence[RingNode]) -> RingNode | None:
    holders = [one for one in nodes if one.lend_bytes >= weights.whole_bytes + MARGIN_BYTES]
    return min(
        holders,
        key=lambda one: (-alone(weights, one).tokens_per_second, one.node_id),
        default=None,
    )


def _in_order(chosen: Sequence[RingNode], links: _NodeLinks, leader: str) -> list[RingNode]:
    """Rank 0 first: the leader, else the first by its id; then always the nearest that is left."""
    left = sorted(chosen, key=lambda one: (one.node_id != leader, one.node_id))
    ranks = [left.pop(0)]
    while left:
        last = ranks[-1].node_id

        def distance(node: RingNode, last: str = last) -> tuple[float, float, str]:
            link = links.between(last, node.node_id)
            return link.rtt_s, -link.bytes_per_s, node.node_id

        nearest = min(left, key=distance)
        left.remove(nearest)
        ranks.append(nearest)
    return ranks


def _groups(
    plan: RingPlan,
    weights: RingWeights,
    ranks: Sequence[RingNode],
    links: _NodeLinks,
    split: RingSplit | None,
) -> Iterator[RingPlan]:
    """The group of these ranks by each split that is possible."""
    backend = _backend(ranks, links)
    around = links.around(ranks)
    count = len(ranks)
    if split is not RingSplit.PIPELINE and weights.has_tensor and not _undivided(weights, count):
        lent = _tensor_bytes(weights, count)
        if all(node.lend_bytes >= lent for node in ranks):
            yield replace(
                plan,
                members=_members(ranks, [weights.layers] * count, [lent] * count),
                backend=backend,
                split=RingSplit.TENSOR,
                speed=of_tensor(weights, ranks, around),
            )
    if split is not RingSplit.TENSOR and weights.has_pipeline:
        layers = share_layers(weights.layers, [_room(weights, node) for node in ranks])
        if layers:
            lent_by_rank = [_pipeline_bytes(weights, each) for each in layers]
            yield replace(
                plan,
                members=_members(ranks, layers, lent_by_rank),
                backend=backend,
                split=RingSplit.PIPELINE,
                speed=of_pipeline(weights, ranks, layers, around),
            )


def _members(
    ranks: Sequence[RingNode], layers: Sequence[int], lent: Sequence[int]
) -> tuple[RingMember, ...]:
    return tuple(
        RingMember(
            node_id=node.node_id,
            label=node.label,
            address=node.address,
            rank=rank,
            layers=layers[rank],
            lend_bytes=lent[rank],
        )
        for rank, node in enumerate(ranks)
    )


def _backend(ranks: Sequence[RingNode], links: _NodeLinks) -> str:
    """RDMA needs Thunderbolt 5 at each node, and a cable between each two."""
    has_rdma = all(node.has_thunderbolt5 for node in ranks)
    is_wired = all(link.network == "thunderbolt" for link in links.all_of(ranks))
    return "jaccl" if has_rdma and is_wired else "ring"


def share_layers(layers: int, rooms: Sequence[int]) -> list[int]:
    """Layers of each rank: in proportion to its room, which is counted in layers; at least one and
    at most its room. [] = they do not fit, or there are fewer layers than ranks."""
    if layers < len(rooms) or min(rooms) < 1 or sum(rooms) < layers:
        return []
    shares = [room * layers / sum(rooms) for room in rooms]
    given = [max(1, int(share)) for share in shares]
    # Whole layers are left over, or, as each rank gets one, are given twice.
    while (left := layers - sum(given)) != 0:
        step = 1 if left > 0 else -1
        rank = max(
            (one for one in range(len(rooms)) if 1 <= given[one] + step <= rooms[one]),
            key=lambda one: (step * (shares[one] - given[one]), -one),
        )
        given[rank] += step
    return given


def _room(weights: RingWeights, node: RingNode) -> int:
    """Layers that a node has room for."""
    left = node.lend_bytes - MARGIN_BYTES - weights.shared_bytes
    return max(0, left // weights.layer_bytes)


def _tensor_bytes(weights: RingWeights, count: int) -> int:
    share = -(-weights.layers * weights.layer_bytes // count)
    return share + weights.shared_bytes + MARGIN_BYTES


def _pipeline_bytes(weights: RingWeights, layers: int) -> int:
    return layers * weights.layer_bytes + weights.shared_bytes + MARGIN_BYTES


def _undivided(weights: RingWeights, count: int) -> str:
    """Which heads so many ranks cannot share equally; "" = none."""
    heads: Mapping[str, int] = {"heads": weights.heads, "KV heads": weights.kv_heads}
    return next((f"{has} {name}" for name, has in heads.items() if has % count), "")


# Why there is no group, in words for the owner.


def _too_few(nodes: Sequence[RingNode], able: Sequence[RingNode]) -> str:
    refused = "; ".join(
        f"{node.label}: {node.refusal}"
        for node in sorted(nodes, key=lambda one: one.node_id)
        if node.refusal
    )
    found = f"a group takes two nodes or more, and {len(able)} can be a member"
    return f"{found} ({refused})" if refused else found


def _why_none(weights: RingWeights, able: Sequence[RingNode], split: RingSplit | None) -> str:
    wants_tensor, wants_pipeline = split is not RingSplit.PIPELINE, split is not RingSplit.TENSOR
    reasons = []
    if wants_tensor:
        reasons.append(_why_no_tensor(weights, able))
    if wants_pipeline:
        reasons.append(_why_no_pipeline(weights, able))
    return "; ".join(reasons)


def _why_no_tensor(weights: RingWeights, able: Sequence[RingNode]) -> str:
    if not weights.has_tensor:
        return f"tensor: mlx-lm has no tensor split of {weights.kind!r} models"
    counts = [
        count
        for count in range(2, min(weights.heads, weights.kv_heads) + 1)
        if not _undivided(weights, count)
    ]
    fitting = [count for count in counts if count <= len(able)]
    if not fitting:
        takes = f"it takes {_listed(counts)} ranks" if counts else "no number of ranks can"
        return (
            f"tensor: {weights.heads} heads and {weights.kv_heads} KV heads are shared equally, "
            f"so {takes}, and {len(able)} nodes can be members"
        )
    count = fitting[-1]
    needed = _tensor_bytes(weights, count)
    short = [node for node in able[:count] if node.lend_bytes < needed]
    return f"tensor: each of {count} nodes must lend {_mb(needed)}, and {_can(short)}"


def _why_no_pipeline(weights: RingWeights, able: Sequence[RingNode]) -> str:
    if not weights.has_pipeline:
        return f"pipeline: mlx-lm has no pipeline of {weights.kind!r} models"
    if weights.layers < 2:
        return f"pipeline: the model has {weights.layers} layer"
    rooms = [_room(weights, node) for node in able]
    return (
        f"pipeline: {weights.layers} layers take {_mb(weights.layers * weights.layer_bytes)}, and "
        f"{len(able)} nodes have room for {sum(rooms)}: each also lends "
        f"{_mb(weights.shared_bytes + MARGIN_BYTES)} for what all ranks hold; {_can(able)}"
    )


def _can(nodes: Sequence[RingNode]) -> str:
    return ", ".join(f"{node.label} can lend {_mb(node.lend_bytes)}" for node in nodes)


def _listed(counts: Sequence[int]) -> str:
    return " or ".join(map(str, counts))


def _mb(count: int) -> str:
    return f"{-(-count // MIB)} MB"
