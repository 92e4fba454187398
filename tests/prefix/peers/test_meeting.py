from __future__ import annotations

import asyncio

import pytest

from kakeya.prefix.peers import fetch as peer_fetch
from kakeya.prefix.peers.service import PrefillCacheService
from tests.prefix.peers import world as w

BLOCKS = 12


@pytest.fixture
async def world(monkeypatch):
    monkeypatch.setattr(peer_fetch, "BESIDE_S", 20.0)  # tests keep the machine busy
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


async def meet(world, peer, prefill, have=0, blocks=BLOCKS, behind=0):
    """Compute and fetch until both meet; how many fetched blocks count, and what came.

    The prefill begins once `behind` blocks came.
    """
    fetcher = await world.fetcher(peer)
    begins = asyncio.Event()
    if not behind:
        begins.set()
    sink = w.Sink(on_put=lambda index: begins.set() if index == blocks - behind else None)
    want = w.wanted(blocks, have=have, rate=w.BLOCK_TOKENS / 0.25)  # 0.25 s a block, it says
    found = await fetcher.approach(want, peer.holder(blocks))
    if found is None:
        return 0, sink
    hit, meeting = found

    async def compute() -> None:
        await begins.wait()
        await prefill(hit.blocks, moved)

    def moved(computed: int = 0) -> None:
        meeting.computed(computed)
        if meeting.pays:
            front.cancel()

    front = asyncio.ensure_future(compute())
    back = asyncio.ensure_future(fetcher.fetch_back(hit, want, meeting, sink, moved))
    try:
        await asyncio.wait((front,))
    finally:
        for task in (front, back):
            task.cancel()
        await asyncio.gather(front, back, return_exceptions=True)
    assert sink.is_right(want.ids)
    assert sink.order == sorted(sink.order, reverse=True)
    assert len(sink.order) == len(set(sink.order))
    return (hit.blocks - meeting.back if meeting.pays else 0), sink


async def test_both_meet_and_the_prefill_is_ended(world):
    peer = await world.peer(sources(), kind=paced(0.05))
    prefill = Prefill()
    fetched, _ = await meet(world, peer, prefill, behind=2)
    assert prefill.was_cancelled
    assert prefill.done + fetched >= BLOCKS
    assert 0 < fetched < BLOCKS


async def test_begins_behind_what_is_here(world):
    peer = await world.peer(sources(), kind=paced(0.05))
    prefill = Prefill(have=4)
    fetched, sink = await meet(world, peer, prefill, have=4, behind=2)
    assert 4 < prefill.done < BLOCKS
    assert min(sink.order) >= 4
    assert prefill.done + fetched >= BLOCKS


@pytest.mark.parametrize("ends", ["dies", "falls silent"])
@pytest.mark.parametrize("block", [0, 1, 3, 5])
async def test_a_peer_that_goes_only_moves_where_they_meet(world, block, ends):
    peer = await world.peer(sources(), kind=paced(0.0, dies_after=block, ends=ends))
    prefill = Prefill(0.02)
    fetched, sink = await meet(world, peer, prefill, behind=block)
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


async def test_cancelled_it_ends_the_call_at_the_peer(world):
    entered, ended = asyncio.Event(), asyncio.Event()

    class Slow(PrefillCacheService):
        async def FetchBlocks(self, request, context):
            entered.set()
            try:
                async for chunk in super().FetchBlocks(request, context):
                    yield chunk
                await asyncio.sleep(60)
            finally:
                ended.set()

    peer = await world.peer(sources(), kind=Slow)

    async def prefill(blocks, computed):
        await entered.wait()

    await meet(world, peer, prefill)
    async with asyncio.timeout(60):
        await ended.wait()


async def test_the_peer_to_meet_is_one_whose_link_is_about_as_fast_as_the_prefill(world):
    fetcher = await world.fetcher()
    want = w.wanted(BLOCKS)
    holders = [
        w.BlockHolder(node_id=name, address="x:1", blocks=BLOCKS) for name in ("a", "b", "c")
    ]
    assert fetcher.prefers_meeting(want, holders) is None
    for holder, factor in zip(holders, (1000.0, 2.0, 0.0001), strict=True):
        fetcher._peer(holder).rate.bytes_per_s = factor * w.BLOCK_BYTES / want.block_s
    assert fetcher.prefers_meeting(want, holders) is holders[1]
    assert fetcher.prefers_meeting(want, holders[:1]) is None
    assert fetcher.prefers_meeting(want, holders[2:]) is None
