"""Declared prompts on other nodes: on so many as are wanted, of those that can, and sent once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import NotFound
from kakeya.core.tasks import Supervisor
from kakeya.dispatch.peers.neighbours import ServingPeer
from kakeya.dispatch.routed.declared_copies import RENEW_S, SPARED_S, DeclaredCopies
from kakeya.prefix.seam import WarmOutcome, WarmReport
from kakeya.prefix.warm.declared import DeclaredText
from tests.dispatch.peers.world import QuotedToy, facts_of
from tests.dispatch.routed.world import OWN, ToyFleet, ToyNode
from tests.fakes import FakeClock
from tests.laws import law
from tests.waiting import until

TEXT = DeclaredText.of("toy", [5, 6, 7, 8])
STEPS = ("leave", "come", "full", "free")
FULL = WarmReport(outcome=WarmOutcome.NO_ROOM, reason="there is no free room")


@dataclass
class Declared:
    """`DeclaredPrompts` that were rendered."""

    texts: tuple[DeclaredText, ...] = (TEXT,)
    count: int = 1
    changed: object = field(default=lambda: None)


class World:
    """One node that declares a prompt, and its fleet."""

    def __init__(self, names: Sequence[str] = "abcd", *, nodes: int = 3) -> None:
        self.clock = FakeClock()
        self.fleet = ToyFleet(self.clock, [ToyNode(name, QuotedToy()) for name in names])
        self.declared = Declared()
        self.in_clear: set[str] = set()
        self.copies = DeclaredCopies(
            self.declared,  # type: ignore[arg-type]
            self.fleet,  # type: ignore[arg-type]
            nodes=nodes,
            facts=facts_of,
            is_private=self._is_private,
            clock=self.clock,
        )

    def _is_private(self, peer: ServingPeer) -> bool:
        return peer.node_id not in self.in_clear

    def keeping(self) -> set[str]:
        """The nodes that are there and keep the prompt for others."""
        nodes = self.fleet.nodes.values()
        return {one.node_id for one in nodes if one.keeper.kept and self.fleet.is_here(one)}

    def warmed(self) -> int:
        """How often its tokens were sent."""
        return sum(
            bool(came.tokens) for one in self.fleet.nodes.values() for came in one.keeper.came
        )

    def told(self) -> dict[str, object]:
        (status,) = self.copies.status()
        return status


async def test_a_prompt_is_kept_by_as_many_nodes_as_are_wanted_and_sent_once_to_each() -> None:
    world = World()
    await world.copies.place()
    keeping = world.keeping()
    assert len(keeping) == 2
    assert world.told() == {
        "model": "toy",
        "tokens": 4,
        "nodes": [OWN, *sorted(keeping)],
        "wanted": 3,
        "passed_over": {},
    }
    held = [one.keeper.came[0].holder for one in world.fleet.nodes.values() if one.keeper.came]
    assert {(one.node_id, one.tokens) for one in held} == {(OWN, 4)}
    came = {name: len(node.keeper.came) for name, node in world.fleet.nodes.items()}
    await world.copies.place()
    assert {name: len(node.keeper.came) for name, node in world.fleet.nodes.items()} == came
    world.clock.advance(RENEW_S)
    await world.copies.place()
    assert (world.keeping(), world.warmed()) == (keeping, 2)
    assert sum(len(node.keeper.came) for node in world.fleet.nodes.values()) == 4


async def test_a_prompt_of_an_adapter_that_was_removed_is_kept_by_none() -> None:
    world = World()

    def removed(model_id: str) -> None:
        raise NotFound(f"no adapter {model_id}")

    copies = DeclaredCopies(
        world.declared,  # type: ignore[arg-type]
        world.fleet,  # type: ignore[arg-type]
        nodes=3,
        facts=removed,
        is_private=lambda _: True,
        clock=world.clock,
    )
    copies.fleet_changed()
    await copies.place()
    copies.fleet_changed()
    assert not world.keeping()


async def test_a_node_that_leaves_is_replaced_and_one_that_is_back_is_told_again() -> None:
    world = World()
    await world.copies.place()
    gone, stays = sorted(world.keeping())
    world.fleet.nodes[gone].away_until_mono = world.clock.mono() + 50
    await world.copies.place()
    now = world.keeping()
    assert len(now) == 2
    assert stays in now
    assert gone not in now
    again = world.fleet.nodes[stays]
    again.life, again.keeper.kept = 2, {}
    await world.copies.place()
    assert len(world.keeping()) == 2


async def test_nodes_that_are_short_of_memory_old_or_in_clear_are_passed_over_and_named() -> None:
    world = World(nodes=2)
    world.fleet.nodes["a"].keeper.report = FULL
    world.fleet.nodes["b"].is_old = True
    world.in_clear = {"c"}
    await world.copies.place()
    assert world.keeping() == {"d"}
    world.fleet.nodes["d"].away_until_mono = world.clock.mono() + 1e6
    await world.copies.place()
    assert world.told()["nodes"] == [OWN]
    passed_over = world.told()["passed_over"]
    assert isinstance(passed_over, dict)
    assert passed_over["a"] == "there is no free room"
    assert "older build" in passed_over["b"]
    assert "not encrypted" in passed_over["c"]
    assert not world.fleet.nodes["c"].keeper.came
    assert not world.fleet.failures
    came = len(world.fleet.nodes["a"].keeper.came)
    await world.copies.place()
    assert len(world.fleet.nodes["a"].keeper.came) == came, "it is not asked again at once"
    world.fleet.nodes["a"].keeper.report = WarmReport(outcome=WarmOutcome.WARM)
    world.clock.advance(SPARED_S)
    await world.copies.place()
    assert world.told()["nodes"] == [OWN, "a"]


async def test_a_node_that_declares_it_too_counts_and_is_sent_no_tokens() -> None:
    world = World(nodes=3)
    world.fleet.nodes["c"].keeper.declared.add(TEXT.digest)
    await world.copies.place()
    assert world.warmed() == 1
    assert {"c", OWN} < set(world.told()["nodes"])  # type: ignore[call-overload]


async def test_another_text_is_kept_in_place_of_the_one_before() -> None:
    world = World(nodes=2)
    async with Supervisor(world.clock) as tasks:
        world.copies.start(tasks)
        await until(lambda: world.warmed() == 1)
        other = DeclaredText.of("toy", [9, 9])
        world.declared.texts = (other,)
        world.declared.changed()  # type: ignore[operator]
        await until(lambda: world.warmed() == 2)
    assert world.told()["tokens"] == 2


@given(
    st.integers(1, 5),
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.sampled_from(["leave", "come", "full", "free"]))
    ),
)
@law(900)
def test_after_each_round_as_many_nodes_as_can_keep_the_prompt(
    nodes: int, steps: list[tuple[str, str]]
) -> None:
    async def play() -> None:
        world = World(nodes=nodes)
        for name, step in steps:
            node = world.fleet.nodes[name]
            match step:
                case "leave":
                    node.away_until_mono = float("inf")
                case "come":
                    node.away_until_mono = float("-inf")
                    node.life += 1
                    node.keeper.kept.clear()
                case "full":
                    node.keeper.report = FULL
                    node.keeper.kept.clear()
                case "free":
                    node.keeper.report = WarmReport(outcome=WarmOutcome.WARM)
            world.clock.advance(SPARED_S + RENEW_S)
            await world.copies.place()
            able = [
                one
                for one in world.fleet.nodes.values()
                if world.fleet.is_here(one) and one.keeper.report is not FULL
            ]
            kept = set(world.told()["nodes"]) - {OWN}  # type: ignore[call-overload]
            assert len(kept) == min(nodes - 1, len(able))
            assert kept <= {one.node_id for one in able if one.keeper.kept}

    asyncio.run(play())


@pytest.mark.parametrize(("nodes", "count", "is_on"), [(1, 1, False), (2, 0, False), (2, 1, True)])
def test_nothing_runs_where_nothing_is_to_be_kept_elsewhere(
    nodes: int, count: int, *, is_on: bool
) -> None:
    world = World(nodes=nodes)
    world.declared.count = count
    assert world.copies.is_on is is_on
