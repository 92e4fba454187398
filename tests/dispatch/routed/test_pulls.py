"""Models that no node offers and a peer has on its disk, as the front door of one node has them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kakeya.core.errors import NotFound, PeerUnavailable
from kakeya.core.units import GIB, MIB
from kakeya.dispatch.routed.model import RoutedModel
from kakeya.dispatch.routed.models import RoutedModels
from kakeya.dispatch.routed.pulls import FleetPulls
from tests.dispatch.peers.world import QuotedToy, ToyModels, facts_of
from tests.dispatch.routed.world import Shelf


class World(Shelf):
    """Peers offer `toy`; one has `kept` and `large` on its disk."""

    def __init__(self) -> None:
        super().__init__()
        self.disks = {"kept": (GIB, 100.0 * MIB), "large": (900 * GIB, 100.0 * MIB)}
        self.fleet.on_disk = lambda: self.disks  # type: ignore[attr-defined]
        self.brought: list[tuple[str, float]] = []
        self.pulls: Any = SimpleNamespace(
            is_on=True,
            refusal=lambda name, size, rate: "it is too large" if size > 9 * GIB else "",
            bring=self.bring,
            waits_for=lambda name: f"the pull of {name}",
        )
        self.own = ToyModels((QuotedToy("mine"),))
        fleet: Any = self.fleet
        self.models = RoutedModels(
            self.own,
            fleet,
            self.history,
            FleetPulls(self.pulls, fleet),  # type: ignore[arg-type]
        )

    async def bring(self, name: str, timeout_s: float) -> QuotedToy:
        self.brought.append((name, timeout_s))
        self.clock.advance(4.0)
        return QuotedToy(name)


@pytest.fixture
def world() -> World:
    return World()


async def test_a_model_on_a_disk_is_pulled_when_it_is_asked_for(world: World) -> None:
    assert [one.model_id for one in world.models.verifiers()] == ["mine", "kept", "toy"]
    model = world.models.get("kept")
    assert isinstance(model, RoutedModel)
    assert world.brought == []
    assert str(model.waits_for()) == "the pull of kept"
    assert await model.ready(30.0) == facts_of()
    assert world.brought == [("kept", 30.0)]
    assert model.folder == QuotedToy("kept").folder


async def test_one_that_a_node_offers_is_not_pulled(world: World) -> None:
    world.disks["toy"] = (1, 1.0)
    await world.models.get("toy").ready(30.0)
    assert world.brought == []


async def test_one_that_may_not_be_pulled_says_why(world: World) -> None:
    with pytest.raises(
        PeerUnavailable, match="no node can load large now, and it is not pulled: it is too large"
    ):
        await world.models.get("large").ready(30.0)
    with pytest.raises(NotFound):
        world.models.get("none")
    model = world.models.get("kept")
    del world.disks["kept"]
    with pytest.raises(NotFound, match="'kept' is not served by the fleet now"):
        await model.ready(30.0)


async def test_a_node_that_leaves_or_may_not_pull_does_not(world: World) -> None:
    world.pulls.is_on = False
    with pytest.raises(NotFound):
        world.models.get("kept")
    world.pulls.is_on = True
    world.models.drain("it leaves")
    with pytest.raises(NotFound):
        world.models.get("kept")
    assert "kept" not in [one.model_id for one in world.models.verifiers()]
