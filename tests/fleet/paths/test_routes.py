"""Routes over real servers, with a wire per endpoint that can be cut."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from kakeya.core.clock import SystemClock
from kakeya.core.tasks import Supervisor
from kakeya.fleet.cards.cards import Card, Endpoint
from kakeya.fleet.gossip.describe import ask_card
from kakeya.fleet.paths.endpoints import REPROBE_S, WATCH_S, RouteChange
from kakeya.fleet.paths.routes import TICK_S, Routes
from tests.fakes import FakeClock
from tests.fleet.nodes import Node, make_wire, running_node
from tests.fleet.proxy import Proxy, running_proxy
from tests.waiting import LIMIT_S, until


class SteppingClock(SystemClock):
    """The machine's clock, moved on by hand between ticks."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def mono(self) -> float:
        return super().mono() + self.ahead_s


class Rig:
    """A node whose Routes are ticked by hand, and what it was told."""

    def __init__(
        self,
        node: Node,
        clock: SteppingClock,
        refused: Sequence[str] = (),
        cable: Proxy | None = None,
    ) -> None:
        self.node, self.clock, self.cable = node, clock, cable
        self.changes: list[RouteChange] = []
        self.asked: list[str] = []
        self.routes = Routes(
            node.registry,
            channels=node.channels,
            clock=clock,
            may_dial=lambda address: self.asked.append(address) or address not in refused,
            on_change=self.changes.append,
        )

    def learn(self, *endpoints: Endpoint, address: str = "") -> None:
        main = address or endpoints[-1].address
        self.node.merge(
            make_wire("peer", address=main, endpoints=endpoints, at=self.node.clock.wall())
        )

    async def step(self, seconds: float = 0.0) -> None:
        """Let time pass, and the probes that are then due come to their end."""
        self.clock.ahead_s += seconds
        self.routes.tick()
        await until(lambda: not self.routes._under_way)

    async def ask(self, channel: grpc.aio.Channel, address: str, *, timeout_s: float) -> Card:
        """Probe with the limit of a probe where the cable is cut; an answer may be late."""
        is_cut = self.cable and self.cable.is_blackhole and address == self.cable.address
        return await ask_card(channel, address, timeout_s=timeout_s if is_cut else LIMIT_S)

    @property
    def address(self) -> str:
        return self.routes.address_for(self.node.card_of("peer"))


@asynccontextmanager
async def rig(*refused: str, cable: Proxy | None = None) -> AsyncIterator[Rig]:
    clock = SteppingClock()
    with pytest.MonkeyPatch.context() as patch:
        async with running_node("me", clock=clock) as node:
            made = Rig(node, clock, refused, cable)
            patch.setattr("kakeya.fleet.paths.routes.ask_card", made.ask)
            patch.setattr("kakeya.fleet.paths.routes._LAG_S", LIMIT_S)
            yield made
            await made.routes.aclose()


async def test_the_cable_is_used_lost_told_once_and_taken_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="kakeya.fleet.paths.routes")
    async with (
        running_node("peer") as peer,
        running_proxy(peer.address) as cable,
        running_proxy(peer.address) as lan,
        rig(cable=cable) as here,
    ):
        here.learn(Endpoint(lan.address, "lan", 20), Endpoint(cable.address, "thunderbolt", 10))
        await here.step()
        assert here.address == cable.address
        cable.is_blackhole = True
        await here.step(WATCH_S)
        assert here.address == lan.address
        for _ in range(10):
            await here.step(WATCH_S)
        assert here.routes.downgrades == 1
        (route,) = here.routes.routes()
        assert route.is_downgraded
        assert (route.network, route.best) == ("lan", "thunderbolt")
        cable.is_blackhole = False
        await here.step(REPROBE_S)
        assert here.address == cable.address
        assert [change.is_downgrade for change in here.changes] == [True, False]
        assert not here.routes.routes()[0].is_downgraded
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "a better link was lost"
    ]


async def test_an_address_where_another_node_answers_is_never_used() -> None:
    async with running_node("peer") as peer, running_node("other") as other, rig() as here:
        here.learn(Endpoint(other.address, "thunderbolt", 10), Endpoint(peer.address, "lan", 20))
        for _ in range(5):
            await here.step(REPROBE_S)
            assert here.address == peer.address
        assert here.changes == []


async def test_only_what_may_be_dialled_is_probed() -> None:
    async with running_node("peer") as peer, running_proxy(peer.address) as forbidden:
        async with rig(forbidden.address) as here:
            here.learn(
                Endpoint(forbidden.address, "thunderbolt", 10), Endpoint(peer.address, "lan", 20)
            )
            await here.step()
            assert here.address == peer.address
            assert here.routes.routes() == ()
            assert forbidden.address in here.asked


async def test_a_node_with_one_address_is_reached_there_without_probes() -> None:
    async with rig() as here:
        here.learn(address="127.0.0.1:1")
        await here.step()
        assert here.address == "127.0.0.1:1"
        assert here.routes.routes() == ()


async def test_a_broken_call_makes_it_look_at_once() -> None:
    async with (
        running_node("peer") as peer,
        running_proxy(peer.address) as cable,
        running_proxy(peer.address) as lan,
        rig(cable=cable) as here,
    ):
        here.learn(Endpoint(cable.address, "thunderbolt", 10), Endpoint(lan.address, "lan", 20))
        await here.step()
        cable.is_blackhole = True
        here.routes.lost(cable.address)
        assert here.address == cable.address
        await here.step()
        assert here.address == lan.address
        here.routes.interfaces_changed()
        cable.is_blackhole = False
        await here.step()
        assert here.address == cable.address


async def test_it_runs_by_itself_and_forgets_nodes_that_are_gone() -> None:
    async with (
        running_node("peer") as peer,
        running_proxy(peer.address) as cable,
        rig() as here,
        Supervisor(here.clock) as tasks,
    ):
        here.learn(Endpoint(cable.address, "thunderbolt", 10), Endpoint(peer.address, "lan", 20))
        here.routes.start(tasks)
        await until(lambda: here.address == cable.address)
        here.clock.ahead_s += 1000
        await until(lambda: here.routes.routes() == ())


async def test_where_no_node_has_several_addresses_it_looks_seldom_but_for_news() -> None:
    async with rig() as here:
        clock = FakeClock(here.clock.wall(), here.clock.mono())
        routes = Routes(here.node.registry, channels=here.node.channels, clock=clock)
        looked: list[float] = []

        def tick() -> bool:
            looked.append(clock.mono())
            return Routes.tick(routes)

        routes.tick = tick  # type: ignore[method-assign]
        here.learn(Endpoint("127.0.0.1:1", "lan", 20))
        async with Supervisor(clock) as tasks:
            routes.start(tasks)
            await clock.sleep(60)
            assert 14 <= len(looked) <= 16
            here.node.merge(make_wire("other", at=here.clock.wall()))
            came_mono = clock.mono()
            await clock.sleep(1.5)
            assert looked[-1] - came_mono == pytest.approx(TICK_S)


async def test_it_waits_for_news_only_where_no_beat_can_bring_a_peer_back() -> None:
    async with rig() as here:
        assert not here.routes.tick()
        here.learn(Endpoint("127.0.0.1:1", "lan", 20))
        assert here.routes.tick()
        here.clock.ahead_s += 1000
        registry, mono = here.node.registry, here.clock.mono()
        assert len(registry.snapshot(mono=mono)) == 1
        assert here.routes.tick()
        registry.expire(now=here.clock.wall(), mono=mono)
        assert not here.routes.tick()
