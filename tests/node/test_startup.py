"""Who a node is when it starts again."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path

import pytest

from kakeya.config import config
from kakeya.fleet.cards.cards import Offer
from kakeya.fleet.identity.authority import create_fleet
from kakeya.fleet.identity.certificates import is_key_id
from kakeya.fleet.identity.identity import FOLDER, Identity, load_identity
from kakeya.fleet.view.registry import CapabilityRegistry
from kakeya.node.datadir import DataDir
from kakeya.node.startup import begin, to_remember
from kakeya.node.state import NodeState
from tests.fakes import FakeClock


async def started(home: Path, identity: Identity | None) -> NodeState:
    """One start and stop of a node, as far as its name and memory go."""
    loaded = await asyncio.to_thread(config.load, ("--data-dir", str(home)), {})
    held = await asyncio.to_thread(DataDir, home)
    try:
        state = await begin(held, loaded, identity, clock=FakeClock(), rng=random.Random(1))
        await asyncio.to_thread(held.save_state, state)
        return state
    finally:
        await asyncio.to_thread(held.close)


async def test_a_member_whose_identity_is_gone_says_so_and_goes_by_another_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It started alone without a word, under the id of a key that it had no more."""
    identity = await asyncio.to_thread(create_fleet, tmp_path, "mini-1", 1_700_000_000.0)
    member = await started(tmp_path, identity)
    assert member.node_id == identity.node_id
    shutil.move(tmp_path / FOLDER, tmp_path / "away")
    alone = await started(tmp_path, await asyncio.to_thread(load_identity, tmp_path))
    assert not is_key_id(alone.node_id)
    assert any("was a member of a fleet" in record.message for record in caplog.records)
    caplog.clear()
    assert (await started(tmp_path, None)).node_id == alone.node_id
    assert not caplog.records
    shutil.move(tmp_path / "away", tmp_path / FOLDER)
    assert (await started(tmp_path, identity)).node_id == identity.node_id


def test_peers_that_live_on_change_the_saved_state_twice_an_hour_at_the_most() -> None:
    """Each change is written to disk."""
    clock = FakeClock(wall=1_700_000_000.0)
    own, peer = (
        CapabilityRegistry(name, Offer(grpc_address=at), now=clock.wall(), mono=clock.mono())
        for name, at in (("mini-1", "10.0.0.1:1"), ("mini-2", "10.0.0.2:1"))
    )
    saved = []
    for _ in range(60):
        now, mono = clock.wall(), clock.mono()
        own.merge([peer.restamp(now=now, mono=mono).wire], now=now, mono=mono)
        saved.append(to_remember(own, "mini-1", clock))
        clock.advance(60)
    seen = [one.memory.peers for one in saved]
    assert {(at.node_id, at.address) for (at,) in seen} == {("mini-2", "10.0.0.2:1")}
    assert len(set(seen)) == 3  # the first of them began within a half hour
    assert all(0 <= 1_700_000_000 + 60 * i - at.last_seen_at < 1800 for i, (at,) in enumerate(seen))
    assert {one.node_id for one in saved} == {"mini-1"}
