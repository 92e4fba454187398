"""A real engine and a peer: blocks that were fetched before it begins, or while it computes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from kakeya.backends.engines import engine_command
from kakeya.core.clock import SystemClock
from kakeya.core.units import KV_BLOCK_TOKENS
from kakeya.fleet.cards.cards import Offer
from kakeya.fleet.cards.convert import from_wire, to_wire
from kakeya.generation.request import Sampling
from kakeya.mlx.findings import Speeds, decode_findings, encode_findings
from kakeya.prefix.names.pieces import pieces_of
from kakeya.prefix.pages.counts import Source
from kakeya.prefix.peers import fetch as peer_fetch
from kakeya.prefix.peers.cards import OwnCaches
from kakeya.prefix.peers.peers import PrefixPeers
from kakeya.prefix.peers.service import PrefillCacheService
from tests.prefix.peers import world as w
from tests.prefix.peers.test_peers import Fleet, ample_slack
from tests.prefix.world import Node, ask, node, text

pytestmark = pytest.mark.asyncio(loop_scope="module")
LENGTH = 4000
__all__ = ["ample_slack"]  # it is used by itself


class Paced(PrefillCacheService):
    """A peer behind a slow link, which may break."""

    block_s = 0.0
    dies_after = 10**6

    async def FetchBlocks(self, request, context):
        sent = 0
        async for chunk in super().FetchBlocks(request, context):
            if chunk.chunk_index == 0:
                if sent >= self.dies_after:
                    await context.abort(w.grpc.StatusCode.UNAVAILABLE, "dying")
                await asyncio.sleep(self.block_s)
                sent += 1
            yield chunk


async def forget(world: Node, prompt: list[int]) -> dict[bytes, bytes]:
    """Take what was computed of a prompt out of pages and disk; its blocks and tail by name."""
    await world.settled()
    pages = world.prefixes.pages
    (shelf,) = pages.shelves()
    held = {one.id: bytes(pages.view(one.payload)) for one in shelf.tree if one.payload is not None}
    drop_pages(world)
    await world.prefixes.store.wipe()
    await asyncio.sleep(0.05)
    assert (await ask(world, text(9, 40))).cached == 0
    ours = {piece.id for piece in pieces_of(shelf.naming.chain, prompt)}
    return {block_id: payload for block_id, payload in held.items() if block_id in ours}


def keep_speed(file: Path) -> None:
    """Have an engine's findings say a speed of prompts: it measures that when its machine is idle,
    which it may never be in a test."""
    tokens = KV_BLOCK_TOKENS
    speeds = Speeds(forwards_s={1: 0.002}, pieces_s={tokens: tokens / 2000.0})
    found = decode_findings(file.read_bytes())
    file.write_bytes(encode_findings(replace(found, speeds=speeds)))


def drop_pages(world: Node) -> None:
    """Have nothing in pages."""
    pages = world.prefixes.pages
    (shelf,) = pages.shelves()
    for one in sorted(shelf.tree, key=lambda one: -one.index):
        pages.lose(shelf, one.id, for_room=True)


@asynccontextmanager
async def a_peer(
    world: Node, blocks: dict[bytes, bytes], *, is_paced: bool = True
) -> AsyncIterator[tuple]:
    """A peer that has these blocks, and whose link may be known to be as fast as the prefill."""
    (shelf,) = world.prefixes.pages.shelves()
    naming = shelf.naming
    source = w.MemorySource(())
    source.blocks = blocks
    sources = w.Sources().add(naming.fingerprint, source)
    clock = SystemClock()
    fleet = Fleet("me", "127.0.0.1:1")
    async with w.a_world() as others:
        peer = await others.peer(sources, kind=Paced)
        own = OwnCaches(sources)
        own.refresh(0.0, nodes=1)
        offer = Offer(grpc_address=peer.address, caches=own.offered)
        wire = to_wire(peer.node_id, offer, incarnation=1, announced_at=clock.wall())
        fleet.registry.merge([wire], now=clock.wall(), mono=clock.mono())
        peers = PrefixPeers(
            fleet, world.prefixes, fleet_key=None, clock=clock, rng=random.Random(1)
        )
        peers._fetch._lookup_s = 5.0
        card = from_wire(wire)
        holder = w.BlockHolder(node_id=card.node_id, address=peer.address, blocks=0)
        block_s = naming.compute_s(naming.block_tokens)
        if is_paced:
            peers._fetch._peer(holder).rate.bytes_per_s = naming.block_bytes / block_s
            peer.service.block_s = block_s
        world.prefixes.elsewhere = peers
        try:
            yield peers, peer
        finally:
            world.prefixes.elsewhere = None
            await fleet.channels.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    findings = tmp_path_factory.mktemp("findings")
    command = engine_command("text", findings=findings)
    async with node(tmp_path_factory.mktemp("earlier"), command=command) as made:
        await made.model.ready(60)
    (file,) = findings.iterdir()
    keep_speed(file)
    async with node(tmp_path_factory.mktemp("node"), command=command) as made:
        await made.model.ready(60)
        assert made.model.facts.prefill_tokens_per_second == 2000.0
        yield made


async def test_an_answer_is_the_same_from_disk_and_from_a_peer(
    world: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a sampled one, which follows every bit of the logits' order."""
    prompt = text(2, 700)
    tokens = world.prefixes.counts.tokens
    monkeypatch.setattr(peer_fetch, "due_s", lambda *said: 20.0)  # tests keep the machine busy
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=7)):
        cold = await ask(world, prompt, 24, sampling=sampling)
        assert cold.cached == 0
        await world.settled()
        drop_pages(world)
        before = dict(tokens)
        from_disk = await ask(world, prompt, 24, sampling=sampling)
        assert tokens[Source.DISK] - before[Source.DISK] == from_disk.cached == len(prompt) - 1
        assert from_disk.tokens == cold.tokens
        blocks = await forget(world, prompt)
        before = dict(tokens)
        async with a_peer(world, blocks, is_paced=False):
            from_peer = await ask(world, prompt, 24, sampling=sampling)
        assert tokens[Source.PEER] - before[Source.PEER] == from_peer.cached == len(prompt) - 1
        assert from_peer.tokens == cold.tokens
        assert await forget(world, prompt) == blocks
        await world.settled()
        world.check_conserved()


@pytest.mark.slow
async def test_an_answer_is_the_same_wherever_its_prompt_was_met(world: Node) -> None:
    prompt = text(1, LENGTH)
    alone = await ask(world, prompt, 8)
    assert alone.cached == 0
    blocks = await forget(world, prompt)
    async with a_peer(world, blocks) as (peers, peer):
        before = world.prefixes.counts.tokens[Source.PEER]
        met = await ask(world, prompt, 8)
        assert met.tokens == alone.tokens
        assert peers.status()["met"] == 1
        assert 0 < world.prefixes.counts.tokens[Source.PEER] - before < LENGTH
        assert met.cached > LENGTH // 2
        await world.settled()
        world.check_conserved()
        await forget(world, prompt)
        peer.service.dies_after = 0
        died = await ask(world, prompt, 8)
        assert (died.tokens, died.cached) == (alone.tokens, 0)
        assert peers.status()["met"] == 1
        await world.settled()
        world.check_conserved()
