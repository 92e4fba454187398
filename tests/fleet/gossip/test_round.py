"""Exchanges between real nodes (S4.5, S4.6, S4.23): union, relay, failures as findings."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya.core.ids import NodeId
from kakeya.core.units import MIB
from kakeya.fleet.cards.cards import CardFault
from kakeya.fleet.cards.convert import join_cards
from kakeya.fleet.gossip.round import (
    EXCHANGE_METHOD,
    PUSH_METHOD,
    SYNC_METHOD,
    Exchanger,
    exchange_once,
)
from kakeya.v1 import distributed_pb2 as pb
from kakeya.v1.distributed_pb2_grpc import CapabilityServiceStub
from kakeya.wire.channels import message_options
from tests.fakes import FakeClock
from tests.fleet.nodes import NOW, make_registry, make_wire, running_node, verifier
from tests.waiting import until


async def test_one_round_gives_both_sides_the_union() -> None:
    async with running_node("a", models=[verifier("m")]) as a, running_node("b") as b:
        done = await a.exchange(b.address)
        assert done.errors == {}
        assert done.outcomes[0].changed == ("b",)
        assert a.known() == ["a", "b"]
        assert b.known() == ["b", "a"]
        assert b.card_of("a").offers(1)[0].model_id == "m"


CARDS = st.dictionaries(
    st.integers(0, 6).map("n{}".format),
    st.tuples(st.integers(0, 3), st.floats(0.0, 110.0)),
    max_size=7,
)
"""For each node its incarnation, and how long ago the view heard of it."""


@settings(max_examples=15, deadline=None)
@given(mine=CARDS, theirs=CARDS, own_age_s=st.floats(0.0, 1000.0), was_met=st.booleans())
def test_one_round_gives_the_union_for_any_ages_of_cards(mine, theirs, own_age_s, was_met) -> None:
    async def run() -> None:
        clock = FakeClock(wall=NOW, mono=2000.0)
        async with running_node("hub", clock=clock) as hub, running_node("me", clock=clock) as me:
            if was_met:
                await me.exchange(hub.address)
                me.registry.restamp(now=clock.wall() + 1.0, mono=clock.mono())
            for node, cards in ((me, mine), (hub, theirs)):
                for name, (incarnation, age_s) in sorted(cards.items(), key=lambda c: -c[1][1]):
                    at = clock.wall() - age_s
                    wire = make_wire(name, at=at, incarnation=incarnation + 1)
                    node.registry.merge([wire], now=at, mono=clock.mono() - age_s)
            clock.advance(min(own_age_s, 1.0))
            done = await exchange_once(
                me.registry, [hub.address], channels=me.channels, clock=clock, sync=me.sync
            )
            assert done.errors == {}
            union = {"me", "hub", *mine, *theirs}
            assert set(me.known()) == set(hub.known()) == union
            for name in {*mine, *theirs}:
                latest = max(view[name][0] for view in (mine, theirs) if name in view)
                assert me.card_of(name).incarnation == latest + 1
                assert hub.card_of(name).incarnation == latest + 1

    asyncio.run(run())


async def test_a_newcomer_learns_of_a_settled_node_in_its_first_digest() -> None:
    clock = FakeClock(wall=NOW, mono=2000.0)
    async with running_node("hub", clock=clock) as hub, running_node("new", clock=clock) as new:
        hub.merge(make_wire("drafter", at=NOW))
        clock.advance(100.0)
        exchanger = Exchanger(new.registry, new.sync, channels=new.channels, clock=clock)
        await exchanger.round([hub.address])
        assert new.known() == ["new", "drafter", "hub"]


async def test_a_program_needs_no_more_than_a_view_and_an_address() -> None:
    async with running_node("hub") as hub:
        registry = make_registry("program", now=time.time(), mono=time.monotonic())
        done = await exchange_once(registry, [hub.address])
        assert done.errors == {}
        assert registry.get("hub", mono=time.monotonic()) is not None


async def test_third_node_view_propagates_transitively() -> None:
    async with running_node("a") as a, running_node("b") as b, running_node("c") as c:
        await a.exchange(b.address)
        await c.exchange(b.address)
        assert sorted(c.known()) == ["a", "b", "c"]
        await a.exchange(b.address)
        assert sorted(a.known()) == ["a", "b", "c"]


async def test_a_chain_converges_within_its_diameter() -> None:
    async with contextlib.AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(running_node(f"n{i}")) for i in range(5)]
        for _ in range(4):
            for left, right in itertools.pairwise(nodes):
                await left.exchange(right.address)
        assert all(len(node.known()) == 5 for node in nodes)


async def test_a_card_relayed_through_a_third_node_arrives_byte_identical() -> None:
    now = time.time()
    message = pb.NodeCapability.FromString(make_wire("old", at=now))
    message.models.add(model_id="x", role=77)  # type: ignore[arg-type]
    message.caches.add(cache_address="10.0.0.7:1", evictions=3)
    message.endpoints.add(address="[fe80::1%en0]:9", network="thunderbolt", priority=2)
    future_field = bytes((0xFA, 0x3F, 3)) + b"new"  # field 1023, which nobody knows
    wire = message.SerializeToString() + future_field
    async with running_node("a") as a, running_node("b") as b, running_node("c") as c:
        a.merge(wire)
        await b.exchange(a.address)
        await c.exchange(b.address)
        card = c.card_of("old")
        assert card is not None
        assert card.wire == wire
        assert [model.role for model in card.models] == [77]


async def test_dead_peer_is_reported_not_raised() -> None:
    async with running_node("a") as a, running_node("b") as b:
        done = await a.exchange("127.0.0.1:1", b.address)
        assert list(done.errors) == ["127.0.0.1:1"]
        assert done.outcomes[0].error_code == "unavailable"
        assert a.known() == ["a", "b"]


async def test_peer_without_the_service_is_reported() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with running_node("a") as a:
            done = await a.exchange(f"127.0.0.1:{port}")
            assert done.outcomes[0].error_code == "unknown_method"
            assert a.known() == ["a"]
    finally:
        await server.stop(None)


@pytest.mark.parametrize("answer", [b"\x0a\xff\x01garbage", b"\xff" * 12, b"\x0b\x01"])
async def test_peer_that_answers_garbage_is_reported(answer: bytes) -> None:
    async with _bytes_peer(answer) as address, running_node("a") as a:
        done = await a.exchange(address)
        assert done.outcomes[0].error_code == "peer_protocol"
        assert address in done.outcomes[0].error


async def test_peer_that_speaks_no_http2_is_reported() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n" * 50)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server, running_node("a") as a:
        host, port = server.sockets[0].getsockname()
        done = await a.exchange(f"{host}:{port}", timeout_s=2.0)
        assert done.outcomes[0].error
        assert a.known() == ["a"]


async def test_garbage_cards_in_an_answer_cost_only_themselves() -> None:
    good = make_wire("good", at=time.time())
    async with _bytes_peer(join_cards([b"\xff\xff", good, b""])) as address:
        async with running_node("a") as a:
            done = await a.exchange(address)
            assert done.errors == {}
            assert done.dropped == {CardFault.MALFORMED: 1, CardFault.BAD_ID: 1}
            assert a.known() == ["a", "good"]


async def test_the_answer_lists_the_callee_first_and_includes_what_was_just_pushed() -> None:
    async with running_node("z") as node, grpc.aio.insecure_channel(node.address) as channel:
        stub = CapabilityServiceStub(channel)
        pushed = pb.NodeCapability.FromString(make_wire("b", at=time.time()))
        answer = await stub.ExchangeCapabilities(
            pb.ExchangeCapabilitiesRequest(known_nodes=[pushed]), timeout=5
        )
        assert [card.node_id for card in answer.known_nodes] == ["z", "b"]
        assert answer.known_nodes[0].announced_at_unix == pytest.approx(time.time(), abs=5)


async def test_get_node_capability_is_the_own_card_and_never_expired() -> None:
    async with running_node("z") as node, grpc.aio.insecure_channel(node.address) as channel:
        stub = CapabilityServiceStub(channel)
        first = (await stub.GetNodeCapability(pb.GetNodeCapabilityRequest(), timeout=60)).node
        second = (await stub.GetNodeCapability(pb.GetNodeCapabilityRequest(), timeout=60)).node
        assert first.node_id == "z"
        assert first.announced_at_unix == pytest.approx(time.time(), abs=5)
        assert second == first  # made anew every few seconds, however often it is asked for
        assert (first.protocol_min, first.protocol_max) == (1, 1)


@pytest.mark.parametrize(
    ("request_bytes", "code"),
    [
        (b"\x0a\x05ab", grpc.StatusCode.INVALID_ARGUMENT),
        (b"\x0b", grpc.StatusCode.INVALID_ARGUMENT),
        (b"\x0a\x00" * 4097, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (b"\x0a" + b"\x80\x80\x80\x01" + bytes(2 * MIB), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
async def test_malformed_and_oversize_batches_get_their_status(
    request_bytes: bytes, code: grpc.StatusCode
) -> None:
    async with running_node("z") as node:
        async with grpc.aio.insecure_channel(node.address, options=message_options()) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await channel.unary_unary(EXCHANGE_METHOD)(request_bytes, timeout=60)
            assert failure.value.code() is code
            assert "Error" not in (failure.value.details() or "")
            answer = await channel.unary_unary(EXCHANGE_METHOD)(b"", timeout=60)
            assert pb.ExchangeCapabilitiesResponse.FromString(answer).known_nodes[0].node_id == "z"


@pytest.mark.parametrize("path", [EXCHANGE_METHOD, SYNC_METHOD, PUSH_METHOD])
@pytest.mark.parametrize(
    ("size", "compression"),
    [(5 * MIB, grpc.Compression.NoCompression), (100 * MIB, grpc.Compression.Gzip)],
)
async def test_oversize_and_bombs_are_refused_by_every_method(
    path: str, size: int, compression: grpc.Compression
) -> None:
    """RELIABILITY row 20."""
    unbounded = (("grpc.max_send_message_length", -1),)
    async with running_node("z") as node:
        async with grpc.aio.insecure_channel(node.address, options=unbounded) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await channel.unary_unary(path)(bytes(size), timeout=60, compression=compression)
            assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            answer = await channel.unary_unary(EXCHANGE_METHOD)(b"", timeout=60)
            assert pb.ExchangeCapabilitiesResponse.FromString(answer).known_nodes[0].node_id == "z"


async def test_a_channel_that_is_closed_during_the_call_is_a_failed_peer() -> None:
    async with _hung_peer() as address, running_node("a") as a:
        started = asyncio.create_task(a.exchange(address))
        await asyncio.sleep(0.1)
        await a.channels.discard(address)
        done = await asyncio.wait_for(started, 60)
        assert done.outcomes[0].error


async def test_a_cancelled_round_ends_as_cancelled() -> None:
    async with _hung_peer() as address, running_node("a") as a:
        started = asyncio.create_task(a.exchange(address))
        await asyncio.sleep(0.05)
        started.cancel()
        with pytest.raises(asyncio.CancelledError):
            await started


@pytest.mark.parametrize(
    ("timeout_s", "slack"), [pytest.param(5.0, 1, marks=pytest.mark.slow), (3.0, 10)]
)
async def test_a_hung_round_keeps_its_deadline_and_hung_peers_do_not_delay_a_good_one(
    timeout_s: float, slack: int
) -> None:
    """RELIABILITY row 31: 24 hung and one good peer."""
    async with contextlib.AsyncExitStack() as stack:
        hung = [await stack.enter_async_context(_hung_peer()) for _ in range(24)]
        a = await stack.enter_async_context(running_node("a"))
        good = await stack.enter_async_context(running_node("good"))
        task = asyncio.create_task(a.exchange(*hung, good.address, timeout_s=timeout_s))
        merged_s = await until(lambda: "good" in a.known())
        assert not task.done(), "it waited for the others"
        assert merged_s <= 1.0 * slack
        done = await asyncio.wait_for(task, 6.0 * slack - merged_s)
        late = set(done.errors) - set(hung)
        assert len(done.errors) - len(late) == 24
        assert not late or slack > 1, "the good one's card came, and then its answer too late"
        codes = {outcome.error_code for outcome in done.outcomes[:24]}
        assert codes <= {"unavailable", "deadline_exceeded"}
        assert "deadline_exceeded" in codes, "no round waited for its deadline"


async def test_a_conflicting_node_id_is_reported_and_the_own_card_stays() -> None:
    async with running_node("same") as a, running_node("same") as b:
        b.registry.restamp(now=time.time() + 5, mono=b.clock.mono())
        await a.exchange(b.address)
        assert a.registry.own.grpc_address == a.address
        assert b.registry.own.grpc_address == b.address
        report = a.merge(b.registry.own.wire)
        assert report.conflicts == (b.address,)


async def test_failures_make_an_address_suspect_and_an_answer_clears_it() -> None:
    async with running_node("a") as a:
        async with running_node("b") as b:
            await a.exchange(b.address)
            address = b.address
        await a.exchange(address)
        assert a.registry.is_suspect("b")
        assert a.registry.suspects() == frozenset({NodeId("b")})
        async with running_node("b", port=int(address.rpartition(":")[2]), incarnation=2):
            while (await a.exchange(address)).errors:
                await asyncio.sleep(0.05)
            assert not a.registry.is_suspect("b")


@contextlib.asynccontextmanager
async def _bytes_peer(answer: bytes) -> AsyncIterator[str]:
    """A gRPC server whose exchange answers fixed bytes."""

    async def handle(request: bytes, context: object) -> bytes:
        return answer

    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                "kakeya.v1.CapabilityService",
                {"ExchangeCapabilities": grpc.unary_unary_rpc_method_handler(handle)},
            ),
        )
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def _hung_peer() -> AsyncIterator[str]:
    """A listener that opens HTTP/2 and says no word more; without that gRPC gives up by itself."""
    writers: list[asyncio.StreamWriter] = []

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(ConnectionError):
            writer.write(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))  # empty settings
            await reader.read()

    server = await asyncio.start_server(swallow, "127.0.0.1", 0)
    try:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"
    finally:
        server.close()
        for writer in writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
