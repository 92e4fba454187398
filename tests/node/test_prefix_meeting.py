"""A real engine computes a prompt from its beginning while a peer sends it from its end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kakeya.core.clock import SystemClock
from kakeya.fleet.cards import Offer
from kakeya.fleet.convert import from_wire, to_wire
from kakeya.node.prefix_counts import Source
from kakeya.node.prefix_peers import PrefixPeers
from kakeya.precache.peer_cards import OwnCaches
from kakeya.precache.peer_service import PrefillCacheService
from tests.node.prefix_world import Node, ask, node, text
from tests.node.test_prefix_peers import Fleet
from tests.precache import peer_world as w

LENGTH = 4000


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
    """Take what was computed of a prompt out of pages and disk; the whole blocks by name."""
    await world.settled()
    pages = world.prefixes.pages
    (shelf,) = pages.shelves()
    held = {one.id: bytes(pages.view(one.payload)) for one in shelf.tree if one.payload is not None}
    whole = {i for i in held if not shelf.tree.node(i).is_tail}
    for one in sorted(shelf.tree, key=lambda one: -one.index):
        pages.lose(shelf, one.id, for_room=True)
    await world.prefixes.store.wipe()
    await asyncio.sleep(0.05)
    assert (await ask(world, text(9, 40))).cached == 0
    return {block_id: held[block_id] for block_id in whole}


@asynccontextmanager
async def meeting(world: Node, blocks: dict[bytes, bytes]) -> AsyncIterator[tuple]:
    """A peer that has these blocks, and whose link is known to be as fast as the prefill."""
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
        holder = w.Holder(node_id=card.node_id, address=peer.address, blocks=0)
        block_s = naming.compute_s(naming.block_tokens)
        peers._fetch._peer(holder).rate.bytes_per_s = naming.block_bytes / block_s
        peer.service.block_s = block_s
        world.prefixes.elsewhere = peers
        try:
            yield peers, peer
        finally:
            world.prefixes.elsewhere = None
            await fleet.channels.aclose()


@pytest.mark.slow
async def test_an_answer_is_the_same_wherever_its_prompt_was_met(tmp_path: Path) -> None:
    async with node(tmp_path) as world:
        await world.model.ready(60)
        prompt = text(1, LENGTH)
        alone = await ask(world, prompt, 8)
        assert alone.cached == 0
        blocks = await forget(world, prompt)
        async with meeting(world, blocks) as (peers, peer):
            met = await ask(world, prompt, 8)
            assert met.tokens == alone.tokens
            assert peers.status()["met"] == 1
            assert 0 < world.prefixes.counts.tokens[Source.PEER] < LENGTH
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
