from __future__ import annotations

import asyncio
import json
import time

import pytest

from kakeya.core.errors import PeerUnavailable
from kakeya.prefix.peers.fetch import PeerFetch
from kakeya.prefix.peers.seams import MissingBlocks
from kakeya.prefix.peers.service import PrefillCacheService, ServiceLimits
from kakeya.v1 import distributed_pb2 as pb
from tests.fakes import FakeClock, set_by
from tests.prefix.peers import world as w

BLOCKS = 6
SPARE_S = 10.0
"""What a busy test machine may add to a deadline."""


@pytest.fixture
async def world():
    async with w.a_world() as world:
        yield world


def sources(blocks: int = BLOCKS, **more) -> w.Sources:
    return w.Sources().add(w.fingerprint(), w.MemorySource(w.chain(blocks), **more))


async def bounded(
    fetcher: PeerFetch, wanted: MissingBlocks, holders, sink: w.Sink, lookup_s: float = 0.0
) -> int:
    """Fetch, and hold it to its promise: never later than computing, the lookup and the slack.

    `lookup_s` is for peers that answer no lookup; the others take none of it to speak of.
    """
    began = time.monotonic()
    taken = await fetcher.fetch(wanted, holders, sink)
    took_s = time.monotonic() - began
    assert took_s <= lookup_s + wanted.slack_s + taken * wanted.block_s + SPARE_S
    assert sink.order == list(range(wanted.have, wanted.have + taken))
    assert sink.is_right(wanted.ids)
    return taken


async def test_fetches_what_a_peer_has_in_order_and_byte_for_byte(world):
    peer = await world.peer(sources())
    fetcher = await world.fetcher(peer)
    sink = w.Sink()
    assert await bounded(fetcher, w.wanted(BLOCKS), [peer.holder()], sink) == BLOCKS
    assert fetcher.stats.bytes == BLOCKS * w.BLOCK_BYTES
    assert peer.service.stats.blocks_served == BLOCKS


async def test_fetches_only_what_is_not_here_yet(world):
    peer = await world.peer(sources())
    fetcher = await world.fetcher(peer)
    sink = w.Sink()
    assert await bounded(fetcher, w.wanted(BLOCKS, have=4), [peer.holder(BLOCKS)], sink) == 2
    (_, source) = next(iter(peer.service._sources.by_exact.values()))
    assert source.reads == list(w.chain(BLOCKS)[4:])


async def test_takes_the_longest_run_of_several_peers(world):
    short, long = await world.peer(sources(2)), await world.peer(sources(5))
    fetcher = await world.fetcher(short, long)
    holders = [short.holder(), long.holder()]
    assert await bounded(fetcher, w.wanted(BLOCKS), holders, w.Sink()) == 5
    assert short.service.stats.fetches == 0


async def test_asks_no_more_than_three_peers_those_first_whose_cards_name_the_most(world):
    peers = [await world.peer(sources(n)) for n in (1, 2, 3, 4)]
    fetcher = await world.fetcher(*peers)
    holders = [peer.holder(n + 1) for n, peer in enumerate(peers)]
    assert await bounded(fetcher, w.wanted(BLOCKS), holders, w.Sink()) == 4
    assert [peer.service.stats.lookups for peer in peers] == [0, 1, 1, 1]


async def test_asks_nobody_whose_card_names_nothing_more(world):
    peer = await world.peer(sources())
    fetcher = await world.fetcher(peer)
    assert await bounded(fetcher, w.wanted(BLOCKS, have=3), [peer.holder(3)], w.Sink()) == 0
    assert peer.service.stats.lookups == 0


async def test_asks_nobody_where_computing_takes_no_longer_than_asking(world):
    peer = await world.peer(sources())
    fetcher = await world.fetcher(peer)
    wanted = w.wanted(BLOCKS, rate=1e6)
    assert await bounded(fetcher, wanted, [peer.holder()], w.Sink()) == 0
    assert peer.service.stats.lookups == 0


async def test_takes_nothing_over_a_link_slower_than_the_prefill(world):
    peer = await world.peer(sources())
    fetcher = await world.fetcher(peer)
    await fetcher.fetch(w.wanted(1), [peer.holder()], w.Sink())
    fetcher._peers[peer.node_id].rate.bytes_per_s = 1000.0  # 100 s a block
    assert await bounded(fetcher, w.wanted(BLOCKS), [peer.holder()], w.Sink()) == 0
    assert peer.service.stats.lookups == 1


async def test_stops_when_the_sink_has_no_room(world):
    peer = await world.peer(sources())
    fetcher = await world.fetcher(peer)
    assert await bounded(fetcher, w.wanted(BLOCKS), [peer.holder()], w.Sink(room=2)) == 2


@pytest.mark.parametrize("block", range(BLOCKS))
async def test_a_peer_that_dies_at_any_block_costs_only_what_it_did_not_send(world, block):
    peer = await world.peer(sources(size=2_000_000))
    fetcher = await world.fetcher(peer)
    sink = w.Sink(on_put=lambda i: peer.server.stop(None) if i == block else None)
    wanted = w.wanted(BLOCKS, block_bytes=2_000_000)
    taken = await bounded(fetcher, wanted, [peer.holder()], sink)
    # What was under way when it died may still arrive whole.
    assert block + 1 <= taken <= block + 3


@pytest.mark.parametrize("block", range(BLOCKS))
async def test_another_peer_goes_on_at_the_block_where_one_died(world, block):
    class Dies(PrefillCacheService):
        async def FetchBlocks(self, request, context):
            async for chunk in super().FetchBlocks(request, context):
                if chunk.block_index == block and chunk.chunk_index == 1:
                    await context.abort(w.grpc.StatusCode.UNAVAILABLE, "dying")
                yield chunk

    dying, healthy = await world.peer(sources(), kind=Dies), await world.peer(sources(BLOCKS - 1))
    fetcher = await world.fetcher(dying, healthy)
    holders = [dying.holder(BLOCKS), healthy.holder(BLOCKS)]
    taken = await bounded(fetcher, w.wanted(BLOCKS), holders, w.Sink())
    assert taken == (BLOCKS - 1 if block < BLOCKS - 1 else block)
    assert world.lost == [dying.address]
    (_, source) = next(iter(healthy.service._sources.by_exact.values()))
    assert source.reads == list(w.chain(BLOCKS)[block : BLOCKS - 1])


async def test_a_peer_that_falls_silent_costs_no_more_than_the_slack(world):
    class Hangs(PrefillCacheService):
        async def FetchBlocks(self, request, context):
            async for chunk in super().FetchBlocks(request, context):
                if chunk.block_index == 2:
                    await asyncio.sleep(60)
                yield chunk

    def cut(index):
        """What comes before the silence has all the time that it needs."""
        if index == 1:
            object.__setattr__(wanted, "most_slack_s", 0.3)
            object.__setattr__(wanted, "prefill_tokens_per_s", w.BLOCK_TOKENS / 4.0)

    peer = await world.peer(sources(), kind=Hangs)
    fetcher = await world.fetcher(peer)
    wanted = w.wanted(BLOCKS)
    assert await bounded(fetcher, wanted, [peer.holder()], w.Sink(on_put=cut)) == 2


async def test_a_peer_that_trickles_is_left_when_prefill_would_have_overtaken_it(world):
    class Trickles(PrefillCacheService):
        async def FetchBlocks(self, request, context):
            async for chunk in super().FetchBlocks(request, context):
                await asyncio.sleep(0.1)
                yield chunk

    peer = await world.peer(sources(), kind=Trickles)
    fetcher = await world.fetcher(peer)
    taken = await bounded(fetcher, w.wanted(BLOCKS, rate=200.0), [peer.holder()], w.Sink())
    assert taken < BLOCKS
    assert fetcher.stats.late == 1


class Deaf(PrefillCacheService):
    async def LookupPrefix(self, request, context):
        await asyncio.Event().wait()


async def test_a_lookup_that_is_not_answered_ends_after_its_deadline(world, monkeypatch):
    deaf, healthy = await world.peer(sources(), kind=Deaf), await world.peer(sources(3))
    fetcher = await world.fetcher(deaf, healthy, lookup_s=60.0)
    holders, ask = [deaf.holder(), healthy.holder()], fetcher._ask

    def cut(holder, wanted, limit_s, *told):
        return ask(holder, wanted, 0.3 if holder == holders[0] else limit_s, *told)

    monkeypatch.setattr(fetcher, "_ask", cut)
    assert await bounded(fetcher, w.wanted(BLOCKS), holders, w.Sink(), 0.3) == 3


async def test_waits_for_no_other_lookup_once_one_peer_has_everything(world):
    deaf, healthy = await world.peer(sources(), kind=Deaf), await world.peer(sources())
    fetcher = await world.fetcher(deaf, healthy, lookup_s=3600.0)
    holders = [deaf.holder(), healthy.holder()]
    async with asyncio.timeout(60):
        assert await bounded(fetcher, w.wanted(BLOCKS), holders, w.Sink()) == BLOCKS
    assert fetcher._peers[deaf.node_id].breaker.state == "closed"


async def test_nobody_is_asked_again_and_again_who_does_not_answer(world):
    deaf = await world.peer(sources(), kind=Deaf)
    fetcher = await world.fetcher(deaf, lookup_s=0.05, clock=FakeClock())  # no backoff ends
    for _ in range(8):
        await bounded(fetcher, w.wanted(BLOCKS), [deaf.holder()], w.Sink(), 0.3)
    assert fetcher.stats.asked == 3


async def test_a_machine_that_is_off_costs_a_lookup(world):
    peer = await world.peer(sources())
    fetcher = await world.fetcher(lookup_s=0.3)
    await peer.server.stop(None)
    assert await bounded(fetcher, w.wanted(BLOCKS), [peer.holder()], w.Sink(), 0.3) == 0


async def test_cancelled_in_the_middle_it_ends_the_call_at_the_peer(world):
    ended = asyncio.Event()

    class Slow(PrefillCacheService):
        async def FetchBlocks(self, request, context):
            try:
                async for chunk in super().FetchBlocks(request, context):
                    yield chunk
                    if chunk.block_index == 1:
                        await asyncio.sleep(60)
            finally:
                ended.set()

    peer = await world.peer(sources(), kind=Slow)
    fetcher = await world.fetcher(peer)
    reached = asyncio.Event()
    sink = w.Sink(on_put=lambda i: reached.set())
    task = asyncio.ensure_future(fetcher.fetch(w.wanted(BLOCKS, rate=1.0), [peer.holder()], sink))
    await set_by(task, reached)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(60):
        await ended.wait()


async def test_blocks_evicted_under_a_lease_by_force_end_the_run_there(world):
    held = sources(size=2_000_000)
    (_, source) = next(iter(held.by_exact.values()))
    peer = await world.peer(held)
    fetcher = await world.fetcher(peer)
    ids = w.chain(BLOCKS)

    def evict(index: int) -> None:
        if index == 0:
            source.evict(ids[BLOCKS - 1], by_force=True)

    wanted = w.wanted(BLOCKS, block_bytes=2_000_000)
    taken = await bounded(fetcher, wanted, [peer.holder()], w.Sink(on_put=evict))
    assert taken == BLOCKS - 1
    assert peer.service.stats.blocks_gone == 1
    assert fetcher._peers[peer.node_id].breaker.state == "closed"


@pytest.mark.parametrize(
    ("checkpoints", "usable"), [({1, 3}, 4), ({5}, 6), (set(), 0), ({0}, 1)], ids=str
)
async def test_of_a_recurrent_model_it_fetches_up_to_the_last_checkpoint(
    world, checkpoints, usable
):
    held = sources()
    (_, source) = next(iter(held.by_exact.values()))
    ids = w.chain(BLOCKS)
    for index in checkpoints:
        source.blocks[ids[index]] = w.payload_of(ids[index], w.BLOCK_BYTES + 500)
    peer = await world.peer(held)
    fetcher = await world.fetcher(peer)
    sink = w.Sink()
    assert (
        await bounded(fetcher, w.wanted(BLOCKS, state_bytes=500), [peer.holder()], sink) == usable
    )


async def test_too_many_streams_are_refused_and_that_is_no_fault(world):
    peer = await world.peer(sources(), limits=ServiceLimits(streams=0))
    fetcher = await world.fetcher(peer)
    for _ in range(4):
        assert await bounded(fetcher, w.wanted(BLOCKS), [peer.holder()], w.Sink()) == 0
    assert peer.service.stats.lookups == 4


async def test_a_peer_without_extensions_serves_from_the_beginning(world):
    class Plain(PrefillCacheService):
        async def LookupPrefix(self, request, context):
            said = await super().LookupPrefix(request, context)
            said.ClearField("block_bytes")
            return said

    peer = await world.peer(sources(), kind=Plain)
    fetcher = await world.fetcher(peer)
    sink = w.Sink()
    assert await bounded(fetcher, w.wanted(BLOCKS, have=2), [peer.holder()], sink) == BLOCKS - 2
    assert peer.service.stats.blocks_served == BLOCKS


async def test_who_lies_is_not_asked_again_for_a_while_however_well_it_answers(world):
    class Liar(PrefillCacheService):
        async def FetchBlocks(self, request, context):
            async for chunk in super().FetchBlocks(request, context):
                yield damage(chunk, "bit flipped")[0] if chunk.block_index == 1 else chunk

    peer = await world.peer(sources(), kind=Liar)
    fetcher = await world.fetcher(peer)
    assert await bounded(fetcher, w.wanted(BLOCKS), [peer.holder()], w.Sink()) == 1
    for _ in range(3):
        assert await bounded(fetcher, w.wanted(BLOCKS), [peer.holder()], w.Sink()) == 0
    assert peer.service.stats.lookups == 1


async def test_who_stops_in_the_middle_again_and_again_is_not_asked_for_a_moment(world):
    class Hangs(PrefillCacheService):
        async def FetchBlocks(self, request, context):
            async for chunk in super().FetchBlocks(request, context):
                if chunk.block_index == 1:
                    await asyncio.sleep(60)
                yield chunk

    peer = await world.peer(sources(), kind=Hangs)
    fetcher = await world.fetcher(peer)
    for _ in range(5):
        await fetcher.fetch(w.wanted(BLOCKS, rate=80.0), [peer.holder()], w.Sink())
    assert peer.service.stats.lookups == 3


async def test_whose_card_names_what_it_does_not_have_makes_way_for_others(world):
    boasters = [await world.peer(sources(0)) for _ in range(3)]
    honest = await world.peer(sources(BLOCKS - 1))
    fetcher = await world.fetcher(*boasters, honest)
    holders = [peer.holder(BLOCKS) for peer in boasters] + [honest.holder(BLOCKS - 1)]
    taken = [await fetcher.fetch(w.wanted(BLOCKS), holders, w.Sink()) for _ in range(4)]
    assert taken == [0, 0, 0, BLOCKS - 1]
    assert [peer.service.stats.lookups for peer in boasters] == [3, 3, 3]


async def test_numbers_that_are_not_finite_are_taken_from_nobody(world):
    layout = {"format": 1, "layers": [{"arrays": [["float16", 1, 3125]]}]}
    kind = w.fingerprint(layout=json.dumps(layout))
    ids = w.chain(BLOCKS, kind)
    source = w.MemorySource(ids)
    source.blocks = dict.fromkeys(ids, bytes(w.BLOCK_BYTES))
    source.blocks[ids[2]] = bytes(w.BLOCK_BYTES - 2) + b"\x00\x7e"
    peer = await world.peer(w.Sources().add(kind, source))
    fetcher = await world.fetcher(peer)
    sink = w.Sink()
    assert await fetcher.fetch(w.wanted(BLOCKS, kind=kind), [peer.holder()], sink) == 2
    assert await fetcher.fetch(w.wanted(BLOCKS, kind=kind), [peer.holder()], sink) == 0
    assert peer.service.stats.lookups == 1


@pytest.mark.parametrize("method", ["LookupPrefix", "FetchBlocks"])
async def test_whoever_is_late_is_told_of_as_it_may_be_met(world, method):
    class Late(PrefillCacheService):
        async def LookupPrefix(self, request, context):
            if method == "LookupPrefix":
                await asyncio.sleep(60)
            return await super().LookupPrefix(request, context)

        async def FetchBlocks(self, request, context):
            await asyncio.sleep(60)
            async for chunk in super().FetchBlocks(request, context):
                yield chunk

    peer = await world.peer(sources(), kind=Late)
    fetcher = await world.fetcher(peer, lookup_s=0.3)
    late: list[w.BlockHolder] = []
    wanted = w.wanted(BLOCKS, most_slack_s=0.1)
    assert await fetcher.fetch(wanted, [peer.holder()], w.Sink(), late=late.append) == 0
    assert late == [peer.holder()]


def with_tail(blocks: int, size: int = w.TAIL_BYTES) -> w.Sources:
    """So many blocks and a tail behind them."""
    held = sources(blocks)
    (_, source) = next(iter(held.by_exact.values()))
    tail_id = w.tails(blocks)[w.TAIL_TOKENS - 1]
    source.blocks[tail_id] = w.payload_of(tail_id, size)
    return held


@pytest.mark.parametrize("blocks", [2, BLOCKS])
async def test_a_tail_behind_the_blocks_that_a_card_names_comes_too(world, blocks):
    peer = await world.peer(with_tail(blocks))
    fetcher = await world.fetcher(peer)
    sink = w.Sink()
    wanted = w.wanted(BLOCKS, tails=w.tails)
    assert await fetcher.fetch(wanted, [peer.holder(blocks)], sink) == blocks + 1
    assert sink.taken[blocks] == w.payload_of(w.tails(blocks)[w.TAIL_TOKENS - 1], w.TAIL_BYTES)
    assert sink.tail_tokens == w.TAIL_TOKENS
    assert fetcher.stats.tokens == blocks * w.BLOCK_TOKENS + w.TAIL_TOKENS


async def test_a_tail_is_not_asked_for_behind_other_blocks_than_are_named(world):
    peer = await world.peer(with_tail(2))
    fetcher = await world.fetcher(peer)
    wanted = w.wanted(BLOCKS, tails=w.tails)
    assert await fetcher.fetch(wanted, [peer.holder(3)], w.Sink()) == 2
    assert fetcher.stats.failures == 0


async def test_of_equal_runs_the_one_with_a_tail_is_taken(world):
    bare, tailed = await world.peer(sources(2)), await world.peer(with_tail(2))
    fetcher = await world.fetcher(bare, tailed)
    wanted = w.wanted(BLOCKS, tails=w.tails)
    assert await fetcher.fetch(wanted, [bare.holder(2), tailed.holder(2)], w.Sink()) == 3
    assert bare.service.stats.fetches == 0


@pytest.mark.parametrize(
    "lie",
    [
        {"tail_tokens": w.BLOCK_TOKENS},
        {"tail_tokens": 2**32 - 1},
        {"tail_bytes": 1 << 40},
        {"tail_bytes": w.TAIL_BYTES + 1},
        {"hit_block_count": 1},
    ],
    ids=str,
)
async def test_a_tail_that_was_not_asked_for_is_no_hit(world, lie):
    class Liar(PrefillCacheService):
        async def LookupPrefix(self, request, context):
            said = await super().LookupPrefix(request, context)
            for name, value in lie.items():
                setattr(said, name, value)
            return said

    peer = await world.peer(with_tail(2), kind=Liar)
    fetcher = await world.fetcher(peer)
    wanted = w.wanted(BLOCKS, tails=w.tails)
    assert await fetcher.fetch(wanted, [peer.holder(2)], w.Sink()) == 0
    assert peer.service.stats.fetches == 0


async def test_a_tail_of_another_size_than_decoding_needs_is_left(world):
    peer = await world.peer(with_tail(2, size=w.TAIL_BYTES - 7))
    fetcher = await world.fetcher(peer)
    wanted = w.wanted(BLOCKS, tails=w.tails)
    assert await fetcher.fetch(wanted, [peer.holder(2)], w.Sink()) == 2
    assert fetcher.stats.failures == 0


async def test_behind_blocks_without_state_a_tail_with_it_makes_all_of_use(world):
    peer = await world.peer(with_tail(3, size=w.TAIL_BYTES + 500))
    fetcher = await world.fetcher(peer)
    wanted = w.wanted(BLOCKS, state_bytes=500, tails=w.tails)
    assert await fetcher.fetch(wanted, [peer.holder(3)], w.Sink()) == 4


def damage(chunk: pb.FetchBlocksResponse, kind: str) -> list[pb.FetchBlocksResponse]:
    """What a peer sends in place of the second chunk of a block."""
    other = pb.FetchBlocksResponse()
    other.CopyFrom(chunk)
    match kind:
        case "bit flipped":
            other.data = bytes([chunk.data[0] ^ 1]) + chunk.data[1:]
        case "truncated":
            other.data = chunk.data[:-1]
        case "oversize":
            other.data = chunk.data * 4
        case "empty":
            other.data = b""
        case "duplicate":
            return [chunk, chunk]
        case "left out":
            return []
        case "hash":
            other.block_hash = bytes(32)
        case "sha256":
            other.block_sha256 = bytes(32)
        case "total":
            other.total_chunks += 1
        case "tokens":
            other.token_count += 1
        case "another block":
            other.block_index += 1
    return [other]


KINDS = ["bit flipped", "truncated", "oversize", "empty", "duplicate", "left out"]
KINDS += ["hash", "sha256", "total", "tokens", "another block"]


@pytest.mark.parametrize("position", [0, 1, 3])
@pytest.mark.parametrize("kind", KINDS)
async def test_no_byte_of_a_block_is_taken_whose_chunks_are_wrong(world, kind, position):
    class Liar(PrefillCacheService):
        async def FetchBlocks(self, request, context):
            async for chunk in super().FetchBlocks(request, context):
                if chunk.block_index == 2 and chunk.chunk_index == position:
                    for said in damage(chunk, kind):
                        yield said
                else:
                    yield chunk

    peer = await world.peer(sources(), kind=Liar)
    fetcher = await world.fetcher(peer)
    # The last chunk once more comes after a block that is whole.
    whole = 3 if (kind, position) == ("duplicate", 3) else 2
    assert await bounded(fetcher, w.wanted(BLOCKS), [peer.holder()], w.Sink()) == whole
    assert fetcher.stats.failures == 1


@pytest.mark.parametrize("swap", ["chunks", "blocks"])
async def test_chunks_and_blocks_out_of_order_are_refused(world, swap):
    class Shuffles(PrefillCacheService):
        async def FetchBlocks(self, request, context):
            chunks = [chunk async for chunk in super().FetchBlocks(request, context)]
            if swap == "chunks":
                chunks[1], chunks[2] = chunks[2], chunks[1]
            else:
                chunks[:4], chunks[4:8] = chunks[4:8], chunks[:4]
            for chunk in chunks:
                yield chunk

    peer = await world.peer(sources(), kind=Shuffles)
    fetcher = await world.fetcher(peer)
    assert await bounded(fetcher, w.wanted(BLOCKS), [peer.holder()], w.Sink()) == 0


@pytest.mark.parametrize(
    "lie",
    [
        {"hit_block_count": BLOCKS + 1},
        {"transfer_bytes": 1},
        {"transfer_bytes": 1 << 50},
        {"block_bytes": [1]},
    ],
    ids=str,
)
async def test_a_lookup_that_contradicts_itself_is_no_hit(world, lie):
    class Liar(PrefillCacheService):
        async def LookupPrefix(self, request, context):
            said = await super().LookupPrefix(request, context)
            for name, value in lie.items():
                said.ClearField(name)
                said.MergeFrom(pb.LookupPrefixResponse(**{name: value}))
            return said

    peer = await world.peer(sources(), kind=Liar)
    fetcher = await world.fetcher(peer)
    assert await bounded(fetcher, w.wanted(BLOCKS), [peer.holder()], w.Sink()) == 0
    assert peer.service.stats.fetches == 0


async def test_blocks_of_another_size_than_announced_are_refused(world):
    class Liar(PrefillCacheService):
        async def LookupPrefix(self, request, context):
            said = await super().LookupPrefix(request, context)
            said.block_bytes[0] += 7
            said.transfer_bytes += 7
            return said

    peer = await world.peer(sources(), kind=Liar)
    fetcher = await world.fetcher(peer)
    wanted = w.wanted(BLOCKS, state_bytes=7)
    assert await bounded(fetcher, wanted, [peer.holder()], w.Sink()) == 0


async def test_a_closed_channel_is_a_failure_and_no_cancellation(world):
    peer = await world.peer(sources())
    fetcher = await world.fetcher(peer)
    await world.channels[peer.address].close()
    assert await bounded(fetcher, w.wanted(BLOCKS), [peer.holder()], w.Sink()) == 0
    with pytest.raises(PeerUnavailable):
        await fetcher._peer(peer.holder()).lookup(peer.holder(), w.wanted(BLOCKS), 1.0)
