"""Plans of ring groups: laws of shares and memory, and the reasons of refusals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.units import MIB
from kakeya.fleet.placement.ring import RingSplit
from kakeya.fleet.placement.ring_plan import (
    MARGIN_BYTES,
    RingPlan,
    plan_ring,
    share_layers,
)
from kakeya.fleet.placement.ring_speed import RingCable, RingNode, RingWeights, alone
from tests.laws import law

FAST_LINKS = {"rtt_s": 50e-6, "bytes_per_s": 1e9}
SPLITS = st.sampled_from([None, *RingSplit])


def node(name: str = "mini-0", lend_mb: int = 4000, **more: object) -> RingNode:
    made = RingNode(
        node_id=name,
        label=name,
        address=f"{name}:1",
        lend_bytes=lend_mb * MIB,
        weights_per_s=1e10,
        products_per_s=1e12,
    )
    return replace(made, **more)  # type: ignore[arg-type]


def model(**more: object) -> RingWeights:
    made = RingWeights(
        model_id="big",
        kind="qwen3_moe",
        layers=12,
        layer_bytes=500 * MIB,
        shared_bytes=200 * MIB,
        read_bytes=6000 * MIB,
        head_bytes=100 * MIB,
        products=3_000_000_000,
        heads=12,
        kv_heads=6,
        hidden_size=1024,
        value_bytes=2,
        has_tensor=True,
        has_pipeline=True,
    )
    return replace(made, **more)  # type: ignore[arg-type]


def links(nodes: Sequence[RingNode], **more: object) -> list[RingCable]:
    fields = {**FAST_LINKS, **more}
    return [
        RingCable(a=one.node_id, b=two.node_id, **fields)  # type: ignore[arg-type]
        for one, two in combinations(nodes, 2)
    ]


@st.composite
def fleets(draw: st.DrawFn) -> list[RingNode]:
    speeds = st.floats(1e8, 1e12)
    return [
        node(
            f"mini-{number}",
            draw(st.integers(0, 9000)),
            weights_per_s=draw(speeds),
            products_per_s=draw(speeds),
            refusal=draw(st.sampled_from(["", "", "", "it drains"])),
        )
        for number in range(draw(st.integers(0, 5)))
    ]


@st.composite
def models(draw: st.DrawFn) -> RingWeights:
    kv_heads = draw(st.integers(1, 8))
    return model(
        layers=draw(st.integers(1, 20)),
        layer_bytes=draw(st.integers(1, 500)) * MIB,
        shared_bytes=draw(st.integers(0, 500)) * MIB,
        kv_heads=kv_heads,
        heads=kv_heads * draw(st.integers(1, 4)),
        has_tensor=draw(st.booleans()),
        has_pipeline=draw(st.booleans()),
    )


@st.composite
def linked(draw: st.DrawFn, nodes: Sequence[RingNode]) -> list[RingCable]:
    return [
        RingCable(
            a=one.node_id,
            b=two.node_id,
            rtt_s=draw(st.floats(0, 0.01)),
            bytes_per_s=draw(st.floats(1e5, 1e10)),
        )
        for one, two in combinations(nodes, 2)
        if draw(st.booleans())
    ]


@given(fleets(), models(), SPLITS, st.data())
@law(3600)
def test_shares_cover_the_model_and_no_node_lends_more_than_it_can(
    nodes: list[RingNode], weights: RingWeights, split: RingSplit | None, data: st.DataObject
) -> None:
    plan = plan_ring(weights, nodes, data.draw(linked(nodes)), split=split)
    assert plan.reason_refused or len(plan.members) >= 2
    by_id = {one.node_id: one for one in nodes}
    assert len({one.node_id for one in plan.members}) == len(plan.members)
    assert [one.rank for one in plan.members] == list(range(len(plan.members)))
    for member in plan.members:
        lender = by_id[member.node_id]
        assert not lender.refusal
        assert member.lend_bytes <= lender.lend_bytes
        assert member.layers >= 1
    if not plan.members:
        return
    lent = sum(one.lend_bytes - MARGIN_BYTES - weights.shared_bytes for one in plan.members)
    assert lent >= weights.layers * weights.layer_bytes
    assert split in (None, plan.split)
    if plan.split is RingSplit.TENSOR:
        assert weights.has_tensor
        assert weights.heads % len(plan.members) == weights.kv_heads % len(plan.members) == 0
        assert set(plan.layers) == {weights.layers}
    else:
        assert weights.has_pipeline
        assert sum(plan.layers) == weights.layers
    assert plan.tokens_per_second > 0 < plan.prefill_tokens_per_second


@given(fleets(), models(), SPLITS, st.data())
@law(1800)
def test_the_order_of_cards_and_links_decides_nothing(
    nodes: list[RingNode], weights: RingWeights, split: RingSplit | None, data: st.DataObject
) -> None:
    known = data.draw(linked(nodes))
    plan = plan_ring(weights, nodes, known, split=split)
    mixed = data.draw(st.permutations(nodes))
    turned = [replace(one, a=one.b, b=one.a) for one in data.draw(st.permutations(known))]
    assert plan_ring(weights, mixed, turned, split=split) == plan


@given(fleets().filter(bool), models(), SPLITS, st.integers(0, 9000), st.data())
@law(1800)
def test_more_memory_makes_no_group_impossible(
    nodes: list[RingNode],
    weights: RingWeights,
    split: RingSplit | None,
    more_mb: int,
    data: st.DataObject,
) -> None:
    before = plan_ring(weights, nodes, split=split)
    if not before.members:
        return
    richer = data.draw(st.sampled_from(nodes))
    now = [
        replace(one, lend_bytes=one.lend_bytes + more_mb * MIB) if one is richer else one
        for one in nodes
    ]
    assert plan_ring(weights, now, split=split).members


@given(fleets(), models(), st.data())
@law(1800)
def test_a_plan_that_stands_is_faster_than_any_node_alone(
    nodes: list[RingNode], weights: RingWeights, data: st.DataObject
) -> None:
    plan = plan_ring(weights, nodes, data.draw(linked(nodes)))
    if plan.reason_refused:
        return
    for one in nodes:
        if one.lend_bytes >= weights.whole_bytes + MARGIN_BYTES:
            assert alone(weights, one).tokens_per_second < plan.tokens_per_second


@given(st.integers(1, 200), st.lists(st.integers(0, 300), min_size=1, max_size=10))
@law(3600)
def test_layers_are_shared_in_proportion(layers: int, rooms: list[int]) -> None:
    given_layers = share_layers(layers, rooms)
    fits = layers >= len(rooms) and min(rooms) >= 1 and sum(rooms) >= layers
    assert bool(given_layers) == fits
    if fits:
        assert sum(given_layers) == layers
        assert all(1 <= one <= room for one, room in zip(given_layers, rooms, strict=True))
        fair = [room * layers / sum(rooms) for room in rooms]
        if min(fair) >= 1:
            assert all(abs(one - part) < 1 for one, part in zip(given_layers, fair, strict=True))


def test_two_nodes_that_hold_half_each_make_a_tensor_group() -> None:
    nodes = [node("mini-0"), node("mini-1")]
    plan = planned(model(), nodes)
    assert plan.reason_refused == ""
    assert (plan.split, plan.backend, plan.alone_on) == (RingSplit.TENSOR, "ring", "")
    assert [one.lend_bytes // MIB for one in plan.members] == [3712, 3712]
    assert plan.speed.waits == 25


def test_unequal_nodes_make_a_pipeline_in_proportion() -> None:
    nodes = [node("mini-0", 2800), node("mini-1", 5800)]
    plan = planned(model(), nodes)
    assert (plan.split, plan.layers, plan.reason_refused) == (RingSplit.PIPELINE, (3, 9), "")


def test_the_leader_is_rank_0_and_the_nearest_node_follows() -> None:
    nodes = [node(f"mini-{number}", 2800) for number in range(3)]
    near = RingCable(a="mini-2", b="mini-1", **{**FAST_LINKS, "rtt_s": 10e-6})  # type: ignore[arg-type]
    plan = plan_ring(model(), nodes, [*links(nodes)[:2], near], leader="mini-2")
    assert [one.node_id for one in plan.members] == ["mini-2", "mini-1", "mini-0"]


def test_a_node_that_holds_the_model_alone_is_named_and_the_group_is_told_nevertheless() -> None:
    nodes = [node("mini-0", 9000), node("mini-1", 9000)]
    plan = plan_ring(model(), nodes, links(nodes, rtt_s=0.02))
    assert plan.alone_on == "mini-0"
    assert "mini-0 can hold big alone" in plan.reason_refused
    assert len(plan.members) == 2


def test_jaccl_only_between_macs_with_thunderbolt_5_and_a_cable_between_each_two() -> None:
    nodes = [node(f"mini-{number}", 2800, has_thunderbolt5=True) for number in range(3)]
    wired = links(nodes, network="thunderbolt")
    assert plan_ring(model(), nodes, wired).backend == "jaccl"
    assert plan_ring(model(), nodes, wired[:2]).backend == "ring"
    older = [replace(nodes[0], has_thunderbolt5=False), *nodes[1:]]
    assert plan_ring(model(), older, wired).backend == "ring"


def test_refusals_say_what_is_missing() -> None:
    two = [node("mini-0", 3000), node("mini-1", 4000)]
    assert planned(model(), two[:1]).reason_refused == (
        "a group takes two nodes or more, and 1 can be a member"
    )
    drains = planned(model(), [two[0], replace(two[1], refusal="it drains")]).reason_refused
    assert drains.endswith("1 can be a member (mini-1: it drains)")
    small = planned(model(has_pipeline=False), two).reason_refused
    assert "each of 2 nodes must lend 3712 MB, and mini-0 can lend 3000 MB" in small
    assert "mlx-lm has no pipeline of 'qwen3_moe' models" in small
    odd = planned(model(heads=9, kv_heads=3, has_pipeline=False), two).reason_refused
    assert "9 heads and 3 KV heads are shared equally, so it takes 3 ranks, and 2 nodes" in odd
    full = planned(model(has_tensor=False), two).reason_refused
    assert "mlx-lm has no tensor split" in full
    assert "12 layers take 6000 MB, and 2 nodes have room for 10" in full


def planned(weights: RingWeights, nodes: Sequence[RingNode]) -> RingPlan:
    return plan_ring(weights, nodes, links(nodes))
