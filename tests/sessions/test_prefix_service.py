"""Keys on gRPC: as metadata of Generate, and PrecacheService by token ids."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import grpc.aio
import pytest

from kakeya.core.errors import InvalidArgument
from kakeya.generation.caller import PRIORITY, peer_host
from kakeya.generation.facts import ModelState
from kakeya.generation.request import GenerationPriority
from kakeya.generation.retention import Retention
from kakeya.prefix.names.keys import CacheKeys
from kakeya.prefix.seam import (
    CACHE_KEY,
    CONVERSATION,
    PREFIX,
    RETENTION,
    SEGMENTS,
    CacheUse,
    NoPrecache,
    PrefixClaim,
    Warmed,
    WarmOutcome,
    WarmReport,
    read_metadata,
    read_retention,
)
from kakeya.sessions.client import Client
from kakeya.sessions.prefix_service import PrecacheService
from kakeya.v1 import precache_pb2 as pb
from kakeya.v1 import runtime_pb2
from kakeya.v1.precache_pb2_grpc import PrecacheServiceStub, add_PrecacheServiceServicer_to_server
from kakeya.wire.security import CLIENT_NAME
from tests.sessions.conftest import running_node
from tests.sessions.toy import HashServedModel, ToyDirectory


@dataclass
class Recorded:
    """A `Precache` that gives every conversation the slot 3."""

    ended: list[tuple[PrefixClaim, list[int]]] = field(default_factory=list)
    warmed: list[tuple[PrefixClaim, list[int], bool]] = field(default_factory=list)
    sources: list = field(default_factory=list)
    opened_for: list[CacheKeys] = field(default_factory=list)

    def kv_key(self, claim: PrefixClaim) -> str:
        return "slot:3" if claim.use.keys != CacheKeys() else ""

    def opened(self, claim: PrefixClaim) -> None:
        self.opened_for.append(claim.use.keys)

    def turn_ended(self, claim, tokens) -> None:
        self.sources.append((claim, tokens))

    async def warm(self, claim, tokens, *, is_pinned=False) -> WarmReport:
        ids = list(await tokens())
        self.warmed.append((claim, ids, is_pinned))
        done = Warmed(tokens=len(ids), cached=1, computed=len(ids) - 2)
        return WarmReport(outcome=WarmOutcome.WARM, warmed=done, is_pinned=is_pinned)


async def generate(node, prompt: Sequence[int], metadata=(), session="") -> str:
    stub = node.stub
    if not session:
        created = await stub.CreateSession(runtime_pb2.CreateSessionRequest())
        session = created.session_id
    await stub.AppendTokens(runtime_pb2.AppendTokensRequest(session_id=session, token_ids=prompt))
    asked = runtime_pb2.GenerateRequest(session_id=session, max_tokens=3)
    call = stub.Generate(asked, metadata=tuple(metadata))
    async for _ in call:
        pass
    return session


async def test_a_conversation_keeps_its_kv_over_sessions():
    precache = Recorded()
    async with running_node(precache=precache) as node:
        metadata = [(CONVERSATION, "room"), (CLIENT_NAME, "alice"), (RETENTION, "long")]
        session = await generate(node, [1, 2, 3], metadata)
        history = [1, 2, 3, *node.model.caches["slot:3"][3:]]
        (claim, tokens), *more = precache.sources
        assert not more
        assert claim.use == CacheUse(
            keys=CacheKeys(conversation_id="room"), retention=Retention.LONG
        )
        assert (claim.client, claim.model_id) == ("alice", "toy")
        assert list(await tokens())[:-1] == history
        assert node.model.requests[-1].kv_key == "slot:3"
        assert node.model.requests[-1].client == "alice"
        info = await node.stub.GetSessionInfo(runtime_pb2.GetSessionInfoRequest(session_id=session))
        assert info.kv_live_bytes == 8 * len(history)
        await generate(node, [*await tokens(), 7], metadata)
        assert node.model.requests[-1].kv_key == "slot:3"


async def test_without_a_key_a_session_keeps_its_own_kv():
    precache = Recorded()
    async with running_node(precache=precache) as node:
        session = await generate(node, [1, 2, 3])
        assert node.model.requests[-1].kv_key == session
        assert precache.sources == []


async def test_the_client_names_its_conversation_and_itself():
    precache = Recorded()
    async with running_node(precache=precache) as node:
        async with Client(node.address, client_name="alice") as client:
            async with await client.create_session() as session:
                await session.append([1, 2])
                assert [t async for t in session.generate(2, conversation_id="room")]
    request = node.model.requests[-1]
    assert (request.kv_key, request.client) == ("slot:3", "alice")
    assert precache.sources[0][0].client == "alice"


async def test_who_asks_and_how_urgently_is_told_to_the_engine():
    async with running_node() as node:
        session = await generate(node, [1])
        assert node.model.requests[-1].priority is GenerationPriority.NORMAL
        assert node.model.requests[-1].client == "127.0.0.1"
        for said, priority in (
            ("batch", GenerationPriority.BATCH),
            ("0", GenerationPriority.URGENT),
        ):
            await generate(node, [2], [(PRIORITY, said)], session)
            assert node.model.requests[-1].priority is priority
        for said in ("3", "speculative", "fast"):
            with pytest.raises(
                grpc.aio.AioRpcError, match="urgent, high, normal, low, batch, or 0, 1, 2"
            ):
                await generate(node, [2], [(PRIORITY, said)], session)
        async with Client(node.address, client_name="alice") as client:
            async with await client.create_session() as own:
                await own.append([1])
                assert [t async for t in own.generate(1, priority=GenerationPriority.BATCH)]
        assert node.model.requests[-1].priority is GenerationPriority.BATCH
        assert node.model.requests[-1].client == "alice"


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.7:50312", "10.0.0.7"),
        ("ipv6:%5B::1%5D:4711", "%5B::1%5D"),
        ("unix:", "unix:"),
        ("unix:/run/a.sock", "unix:/run/a.sock"),
    ],
)
def test_a_caller_without_a_name_is_its_machine(peer, host):
    assert peer_host(peer) == host


async def test_a_retention_that_is_none_is_refused_and_the_session_stays_usable():
    async with running_node(precache=Recorded()) as node:
        created = await node.stub.CreateSession(runtime_pb2.CreateSessionRequest())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(node, [1], [(RETENTION, "forever")], created.session_id)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "x-kakeya-retention is 'forever'" in caught.value.details()
        await generate(node, [2], [(RETENTION, "24h")], created.session_id)


def test_metadata_carries_every_key():
    said = {CONVERSATION: "c", SEGMENTS: "s", PREFIX: "p", CACHE_KEY: "k", RETENTION: "extended"}
    assert read_metadata([*said.items(), ("other-bin", b"x")]) == CacheUse(
        keys=CacheKeys(
            conversation_id="c", segment_hash="s", prefix_hash="p", prompt_cache_key="k"
        ),
        retention=Retention.EXTENDED,
    )
    assert read_metadata([]).is_empty


@pytest.mark.parametrize(
    ("word", "retention"),
    [
        ("short", Retention.SHORT),
        ("in_memory", Retention.IN_MEMORY),
        ("in-memory", Retention.IN_MEMORY),
        ("long", Retention.LONG),
        ("extended", Retention.EXTENDED),
        ("24h", Retention.EXTENDED),
    ],
)
def test_retentions_have_our_words_and_those_of_openai(word, retention):
    assert read_retention(word, "x") is retention


def test_another_word_is_refused_with_all_that_are_known():
    with pytest.raises(InvalidArgument, match=r"x is 'week'.*short, long, extended"):
        read_retention("week", "x")


@asynccontextmanager
async def precache_node(model=None, precache=None):
    model = model or HashServedModel()
    precache = precache or Recorded()
    server = grpc.aio.server()
    add_PrecacheServiceServicer_to_server(PrecacheService(ToyDirectory((model,)), precache), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            yield PrecacheServiceStub(channel), precache, f"127.0.0.1:{port}"
        finally:
            await server.stop(0)


async def test_a_prefix_of_token_ids_is_warmed():
    async with precache_node() as (stub, precache, _):
        answer = await stub.Warm(
            pb.WarmRequest(
                token_ids=range(20),
                conversation_id="room",
                retention=pb.PREFIX_RETENTION_LONG,
                pin=True,
            )
        )
        assert answer == pb.WarmResponse(
            status="warm",
            token_count=20,
            cached_token_count=1,
            computed_token_count=18,
            pinned=True,
        )
        ((claim, ids, is_pinned),) = precache.warmed
        assert (ids, is_pinned) == (list(range(20)), True)
        assert claim.use.retention is Retention.LONG
        assert claim.use.keys.conversation_id == "room"


async def test_a_prefix_without_a_key_is_filed_under_its_content():
    async with precache_node() as (stub, precache, _):
        for ids in ([1, 2], [1, 2], [1, 3]):
            await stub.Warm(pb.WarmRequest(token_ids=ids))
        one, same, other = (claim.use.keys.prefix_hash for claim, _, _ in precache.warmed)
        assert one == same != other


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (pb.WarmRequest(), "token_ids holds 0 ids"),
        (pb.WarmRequest(token_ids=range(50)), "1 to 39"),
        (pb.WarmRequest(token_ids=[5, 97]), "token_ids[1] is 97"),
        (pb.WarmRequest(token_ids=[1], retention=9), "retention is 9"),
        (pb.WarmRequest(model_id="x", token_ids=[1]), "'x'"),
    ],
)
async def test_what_cannot_be_meant_is_refused(request_, says):
    async with precache_node(HashServedModel(context=40)) as (stub, precache, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Warm(request_)
        assert says in caught.value.details()
        assert precache.warmed == []


async def test_a_model_that_is_away_is_not_loaded_for_a_prefix():
    model = HashServedModel(state=ModelState.UNLOADED)
    async with precache_node(model) as (stub, precache, _):
        answer = await stub.Warm(pb.WarmRequest(token_ids=[1]))
        assert answer.status == "skipped_away"
        assert "toy is unloaded" in answer.reason
        assert precache.warmed == []


async def test_a_node_without_a_cache_says_so():
    async with precache_node(precache=NoPrecache()) as (stub, *_):
        answer = await stub.Warm(pb.WarmRequest(token_ids=[1]))
        assert (answer.status, answer.reason) == ("skipped_away", "this node keeps no prefixes")


async def test_the_client_has_a_prefix_warmed():
    async with precache_node() as (_, precache, address):
        async with Client(address, client_name="alice") as client:
            report = await client.warm(
                range(10), conversation_id="room", retention=Retention.EXTENDED, pin=True
            )
            assert report == WarmReport(
                outcome=WarmOutcome.WARM,
                warmed=Warmed(tokens=10, cached=1, computed=8),
                is_pinned=True,
            )
            with pytest.raises(InvalidArgument, match="0 ids"):
                await client.warm([])
    ((claim, _, is_pinned),) = precache.warmed
    assert (claim.client, claim.use.retention, is_pinned) == ("alice", Retention.EXTENDED, True)


async def test_a_session_that_opens_with_a_key_has_its_prefix_warmed():
    precache = Recorded()
    async with running_node(precache=precache) as node:
        await node.stub.CreateSession(runtime_pb2.CreateSessionRequest())
        assert precache.opened_for == []
        await node.stub.CreateSession(
            runtime_pb2.CreateSessionRequest(), metadata=(("x-kakeya-conversation", "room"),)
        )
    assert precache.opened_for == [CacheKeys(conversation_id="room")]
