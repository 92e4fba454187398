from __future__ import annotations

import asyncio

import pytest

from kakeya.core.errors import PeerUnavailable
from kakeya.precache.peer_service import PrefillCacheService

from . import peer_world as w

BLOCKS = 12


@pytest.fixture
async def world():
    async with w.a_world() as world:
        yield world


def sources(blocks: int = BLOCKS) -> w.Sources:
    return w.Sources().add(w.fingerprint(), w.MemorySource(w.chain(blocks)))


class Prefill:
    """Computes a block in `block_s` seconds; knows how far it came and how it ended."""

    def __init__(self, block_s: float = 0.05, have: int = 0) -> None:
        self.block_s, self.done = block_s, have
        self.was_cancelled = False

    async def __call__(self, blocks, computed):
        try:
            while self.done < blocks:
                await asyncio.sleep(self.block_s)
                self.done += 1
                computed(self.done)
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


def paced(seconds: float, dies_after: int = BLOCKS, ends: str = "dies"):
    """A peer that takes so long for a block, and after some of them dies or falls silent."""

    class Paced(PrefillCacheService):
        async def FetchBlocks(self, request, context):
            sent = 0
            async for chunk in super().FetchBlocks(request, context):
                if chunk.chunk_index == 0:
                    if sent == dies_after and ends == "dies":
                        await context.abort(w.grpc.StatusCode.UNAVAILABLE, "dying")
                    await asyncio.sleep(60 if sent == dies_after else seconds)
                    sent += 1
                yield chunk

    return Paced


async def meet(world, peer, prefill, have=0, blocks=BLOCKS):
    fetcher = await world.fetcher(peer)
    sink = w.Sink()
    want = w.wanted(blocks, have=have, rate=w.BLOCK_TOKENS / 0.25)  # 0.25 s a block, it says
    fetched = await fetcher.meet(want, [peer.holder(blocks)], sink, prefill)
    assert sink.is_right(want.ids)
    assert sink.order == sorted(sink.order, reverse=True)
    assert len(sink.order) == len(set(sink.order))
    return fetched, sink


async def test_both_meet_and_the_prefill_is_ended(world):
    peer = await world.peer(sources(), kind=paced(0.05))
    prefill = Prefill()
    fetched, _ = await meet(world, peer, prefill)
    assert prefill.was_cancelled
    assert prefill.done + fetched >= BLOCKS
    assert 0 < fetched < BLOCKS


async def test_begins_behind_what_is_here(world):
    peer = await world.peer(sources(), kind=paced(0.05))
    prefill = Prefill(have=4)
    fetched, sink = await meet(world, peer, prefill, have=4)
    assert 4 < prefill.done < BLOCKS
    assert min(sink.order) >= 4
    assert prefill.done + fetched >= BLOCKS


@pytest.mark.parametrize("ends", ["dies", "falls silent"])
@pytest.mark.parametrize("block", [0, 1, 3, 5])
async def test_a_peer_that_goes_only_moves_where_they_meet(world, block, ends):
    peer = await world.peer(sources(), kind=paced(0.0, dies_after=block, ends=ends))
    prefill = Prefill(0.02)
    fetched, sink = await meet(world, peer, prefill)
    assert len(sink.order) == block
    if fetched:
        assert prefill.done == BLOCKS - block
        assert fetched == block
    else:  # too few to be worth a switch
        assert prefill.done == BLOCKS
        assert not prefill.was_cancelled


async def test_a_slow_peer_never_ends_a_prefill_for_nothing(world):
    peer = await world.peer(sources(), kind=paced(0.2))
    prefill = Prefill(0.01)
    fetched, _ = await meet(world, peer, prefill)
    assert fetched == 0
    assert prefill.done == BLOCKS


async def test_where_nobody_has_more_nothing_is_begun(world):
    peer = await world.peer(sources(2))
    prefill = Prefill()
    fetched, _ = await meet(world, peer, prefill, have=2)
    assert (fetched, prefill.done) == (0, 0)


async def test_a_prefill_that_fails_ends_it_without_a_word(world):
    peer = await world.peer(sources(), kind=paced(0.05))

    async def failing(blocks, computed):
        raise PeerUnavailable("the engine ended")

    fetched, _ = await meet(world, peer, failing)
    assert fetched == 0


async def test_cancelled_it_ends_the_prefill_too(world):
    peer = await world.peer(sources(), kind=paced(60.0))
    prefill = Prefill(60.0)
    task = asyncio.ensure_future(meet(world, peer, prefill))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert prefill.was_cancelled
