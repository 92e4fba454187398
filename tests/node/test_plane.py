"""Whom the fleet half of a node expects at an address, whatever cards claim."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from kakeya.core.clock import SystemClock
from kakeya.fleet.cards import Endpoint, Offer
from kakeya.fleet.memory import Memory
from kakeya.node import config
from kakeya.node.plane import Chances, FleetPlane
from kakeya.node.state import NodeState
from tests.fleet.nodes import make_wire
from tests.node.test_reach import Cables, opened

HONEST, HOSTILE = "zz-honest", "aa-hostile"
ADDRESS = "10.0.0.7:50051"


@pytest.fixture
async def plane(tmp_path: object) -> AsyncIterator[FleetPlane]:
    clock = SystemClock()
    async with opened(Cables("127.0.1.1"), "--bind", "127.0.1.1:0") as rig:
        made = FleetPlane(
            (await asyncio.to_thread(config.load, ("--no-mdns",), {})).fleet,
            state=NodeState(node_id="me", memory=Memory()),
            data_dir=tmp_path,  # type: ignore[arg-type]
            trust=None,
            reach=rig.reach,
            offer=Offer(grpc_address="127.0.1.1:1"),
            chances=Chances(clock=clock, rng=random.Random(1)),
            on_round=lambda done: None,
        )
        yield made
        await made.aclose()


def learn(plane: FleetPlane, node_id: str, address: str, *more: str) -> None:
    clock = SystemClock()
    endpoints = [Endpoint(way, "lan", 20) for way in (address, *more)]
    wire = make_wire(node_id, address=address, endpoints=endpoints, at=clock.wall())
    plane.registry.merge([wire], now=clock.wall(), mono=clock.mono())


async def test_a_member_that_claims_anothers_address_does_not_become_the_one_expected_there(
    plane: FleetPlane,
) -> None:
    learn(plane, HONEST, ADDRESS)
    assert plane._node_at(ADDRESS) == HONEST
    learn(plane, HOSTILE, "10.0.0.8:50051", ADDRESS)
    assert plane._node_at(ADDRESS) == ""
    assert plane._node_at("10.0.0.8:50051") == HOSTILE
    assert plane._node_at("10.0.0.9:50051") == ""


async def test_a_failed_call_doubts_the_node_that_is_reached_there(plane: FleetPlane) -> None:
    learn(plane, HOSTILE, "10.0.0.8:50051", ADDRESS)
    learn(plane, HONEST, ADDRESS)
    plane.call_failed(ADDRESS)
    assert plane.registry.suspects() == {HONEST}
