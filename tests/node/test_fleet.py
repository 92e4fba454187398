"""The fleet half of a node: what it shows of others, whom it doubts and whom it lets go."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from kakeya.cli.show.display import show_plan, show_status
from kakeya.config import config
from kakeya.core.clock import Clock, SystemClock
from kakeya.fleet.cards.cards import Endpoint, Offer
from kakeya.fleet.identity.trust import FleetTrust
from kakeya.fleet.paths.interfaces import source_host
from kakeya.fleet.paths.round_trips import SETTLE_S, STEPS_MS
from kakeya.fleet.view.suspicion import Doubt, sign_of
from kakeya.fleet.view.tombstones import RegistryState
from kakeya.memory.plugins import PluginReport
from kakeya.node.fleet import Chances, NodeFleet
from kakeya.node.state import NodeState
from kakeya.node.status import Json, NodeView, describe
from kakeya.v1 import distributed_pb2 as pb
from tests.fakes import SettableClock
from tests.fleet.members import sealed_card
from tests.fleet.nodes import make_wire, running_node
from tests.fleet.paths.test_own_addresses import Cables, opened
from tests.wire.certificates import Fleet

HONEST, HOSTILE = "zz-honest", "aa-hostile"
ADDRESS = "10.0.0.7:50051"


@asynccontextmanager
async def made_plane(
    folder: Path,
    *flags: str,
    bind: str = "127.0.1.1:0",
    clock: Clock | None = None,
    trust: FleetTrust | None = None,
    source: Callable[[str], str] = source_host,
) -> AsyncIterator[NodeFleet]:
    """The fleet half of a node, not started."""
    clock = clock or SystemClock()
    chances = Chances(clock=clock, rng=random.Random(1))
    node_id = trust.identity.node_id if trust else "me"
    cables = Cables("127.0.1.1")
    async with opened(cables, "--bind", bind, clock=clock, source=source) as rig:
        made = NodeFleet(
            (await asyncio.to_thread(config.load, flags, {})).fleet,
            state=NodeState(node_id=node_id, memory=RegistryState()),
            data_dir=folder,
            trust=trust,
            reach=rig.reach,
            offer=Offer(grpc_address="127.0.1.1:1"),
            chances=chances,
            on_round=lambda done: None,
        )
        yield made
        await made.aclose()


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[NodeFleet]:
    async with made_plane(tmp_path, "--no-mdns") as made:
        yield made


async def test_no_mdns_turns_it_off_and_typed_peers_still_count(tmp_path: Path) -> None:
    peer, clock = ("--peer", "10.0.0.9:50051"), SystemClock()
    async with (
        made_plane(tmp_path, *peer, bind="0.0.0.0:0") as looks,
        made_plane(tmp_path, *peer, "--no-mdns", bind="0.0.0.0:0") as does_not,
    ):
        assert looks.discovery is not None
        assert does_not.discovery is None
        for made in (looks, does_not):
            assert made.gossip._choose((), now=clock.wall()) == peer[1:]
        assert status_of(looks)["fleet"]["mdns_sightings"] is not None  # type: ignore[index]
        assert status_of(does_not)["fleet"]["mdns_sightings"] is None  # type: ignore[index]


def learn(plane: NodeFleet, node_id: str, address: str, *more: str) -> None:
    clock = SystemClock()
    endpoints = [Endpoint(way, "lan", 20) for way in (address, *more)]
    wire = make_wire(node_id, address=address, endpoints=endpoints, at=clock.wall())
    plane.registry.merge([wire], now=clock.wall(), mono=clock.mono())


# --- certificates that run out


DAY_S = 86_400.0


@pytest.mark.parametrize(
    ("days", "is_gone"),
    [(4, False), (6, True), (400, False)],
    ids=["valid", "run out", "by a clock that is a year ahead"],
)
async def test_a_node_that_did_not_renew_its_certificate_is_let_go(
    tmp_path: Path, days: int, is_gone: bool
) -> None:
    """Its connection was checked when it was opened, and its beats need no certificate."""
    clock, fleet = SettableClock(), Fleet()
    async with made_plane(tmp_path, "--no-mdns", clock=clock, trust=fleet.trust) as plane:
        cards = {}
        for address, age in ((ADDRESS, timedelta(days=360)), ("10.0.0.8:50051", timedelta())):
            who = fleet.identity(age=age)
            cards[address] = sealed_card(who, address)
        report = plane.registry.merge(cards.values(), now=clock.wall(), mono=clock.mono())
        assert len(report.changed) == 2
        for address in cards:
            plane.channels.get(address)
        clock.shift_wall(days * DAY_S)
        assert plane.let_go() == is_gone
        await asyncio.gather(*plane._closing)
        left = set(cards) - ({ADDRESS} if is_gone else set())
        assert {card.grpc_address for card in plane.live_peers()} == left
        assert plane.channels.addresses == left


async def test_words_that_a_member_chose_neither_drive_the_terminal_nor_end_the_command(
    plane: NodeFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b[2J\x1b]0;owned\x07[/red] [bold]"
    node = {"node_id": evil, "label": evil, "platform": evil, "grpc_address": evil, "age_s": 1.0}
    model = {"model_id": evil, "role": evil, "state": evil, "error": evil}
    node |= {"models": [model], "route": {"address": evil, "network": evil}}
    fleet = {"nodes": [node], "warnings": [evil], "identity": {"fleet": evil}}
    show_status({"node": node, "models": [model], "fleet": fleet})
    names = dict.fromkeys(("verifier_model", "verifier_node", "proposer_model"), evil)
    show_plan({"placement": names, "drafts": {evil: {evil: [evil]}}})
    show_plan({"reason": evil})
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert shown.count("[bold]") > 5, "shown as it was written"


async def test_a_failed_call_doubts_the_node_that_is_reached_there(plane: NodeFleet) -> None:
    learn(plane, HOSTILE, "10.0.0.8:50051", ADDRESS)
    learn(plane, HONEST, ADDRESS)
    plane.call_failed(ADDRESS)
    assert plane.registry.suspects() == {HONEST}


def status_of(plane: NodeFleet, **beside: object) -> Json:
    told = {"plugins": (), "damaged": {}, "models": (), **beside}
    cards = plane.registry.snapshot(mono=SystemClock().mono())
    return describe(
        NodeView(
            node_id="me",
            grpc="127.0.1.1:1",
            http="127.0.0.1:2",
            listeners=(),
            uptime_s=1.0,
            now=SystemClock().wall(),
            mono=SystemClock().mono(),
            not_serving="",
            cards=cards,
            fleet=plane.view(cards),
            state_error="",
            memory={},
            adapters={},
            prefixes={},
            precache={},
            backends=(),
            **told,
        )
    )


async def test_a_node_of_another_protocol_is_told_with_both_ranges(plane: NodeFleet) -> None:
    clock = SystemClock()
    card = pb.NodeCapability.FromString(make_wire("newer", at=clock.wall()))
    card.protocol_min, card.protocol_max = 7, 9
    plane.registry.merge([card.SerializeToString()], now=clock.wall(), mono=clock.mono())
    learn(plane, "fine", "10.0.0.6:50051")
    fleet = status_of(plane)["fleet"]
    assert isinstance(fleet, dict)
    assert fleet["warnings"] == [
        "newer speaks versions 7 to 9 of the fleet's protocol and this node 1 to 1; "
        "update the older one"
    ]


async def test_what_a_node_cannot_use_stands_among_its_warnings(plane: NodeFleet) -> None:
    report = PluginReport(name="rerank", origin="reranker:capability", error="No module named 'x'")
    fleet = status_of(plane, plugins=(report,), damaged={"a.klora.damaged": "damaged: cut off"})
    assert fleet["fleet"]["warnings"] == [  # type: ignore[index,call-overload]
        "the plug-in rerank (reranker:capability) is not used: No module named 'x'",
        "the adapter a.klora.damaged: damaged: cut off",
    ]


async def test_an_edge_that_only_this_node_lacks_is_told_apart_from_a_dead_node(
    plane: NodeFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    mono, book = SystemClock().mono(), plane.registry.suspicions
    learn(plane, "fine", "10.0.0.6:50051")
    for node_id, address, doubt in (
        ("behind-a-wall", "10.0.0.8:50051", Doubt.ASYMMETRIC),
        ("gone", "10.0.0.9:50051", Doubt.FLEET_WIDE),
    ):
        learn(plane, node_id, address)
        card = plane.registry.get(node_id, mono=mono)
        assert card is not None
        book.fail(address, card, mono)
        book.settle(card, sign_of(card), doubt, mono)
    status = status_of(plane)
    fleet = status["fleet"]
    assert isinstance(fleet, dict)
    assert {card["node_id"]: card["doubt"] for card in fleet["nodes"]} == {
        "me": None,
        "fine": None,
        "behind-a-wall": "asymmetric",
        "gone": "fleet_wide",
    }
    assert [line for line in fleet["warnings"] if "others reach" in line] == [
        "others reach behind-a-wall and this node does not; `kakeya doctor behind-a-wall` says why"
    ]
    show_status(status)
    shown = capsys.readouterr().out.split()  # columns fold, so words
    assert {"answers", "nodes", "but", "not", "no"} <= set(shown)
    assert "doctor" in shown


async def test_each_answer_of_a_round_is_a_round_trip_of_the_own_network(tmp_path: Path) -> None:
    clock = SettableClock()
    async with (
        running_node("peer") as peer,
        made_plane(
            tmp_path, bind="0.0.0.0:0", clock=clock, source=lambda address: "127.0.1.1"
        ) as plane,
    ):
        await plane.gossip.round([peer.address, "127.0.0.1:1"])
        clock.advance(SETTLE_S + 1)
        assert plane.reach.settle_round_trips()
        (way,) = plane.reach.endpoints
        assert way.rtt_ms in STEPS_MS


def test_the_table_says_what_the_pages_hold(capsys: pytest.CaptureFixture[str]) -> None:
    pages = {"total": 8, "free": 4, "pinned": 2, "evictable": 2, "fragmentation": 0.5}
    show_status({"adapters": {"registered": 0, "pages": pages}})
    assert "8: 2 pinned, 2 evictable, 4 free; fragmentation 0.5" in capsys.readouterr().out
