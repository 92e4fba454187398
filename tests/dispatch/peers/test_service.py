"""A model at another node: the same frames, errors and ends as of one at this node.

A real server and real channels on loopback; the models are hashes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest

from kakeya.core import errors
from kakeya.core.errors import (
    Denied,
    InvalidArgument,
    KakeyaError,
    NotFound,
    PeerProtocol,
    PeerUnavailable,
    Refused,
    UnknownMethod,
)
from kakeya.dispatch.peers import client
from kakeya.dispatch.peers.client import PeerCalls
from kakeya.dispatch.peers.held_answers import AnswerCopy
from kakeya.dispatch.peers.quote import AnswerOrigin, origin_of
from kakeya.generation.cuts import marked
from kakeya.generation.facts import ModelState, RequestLoad
from kakeya.generation.frames import Done, Frame, Progress, StopReason, Tokens
from kakeya.generation.manifest import Manifest
from kakeya.generation.model import AdaptedId
from kakeya.generation.request import DecodeRequest, DraftSource, GenerationPriority, Sampling
from kakeya.generation.retention import Retention
from kakeya.generation.waiting import RequestWait, WaitReason, WaitTeller
from kakeya.v1 import engine_pb2
from kakeya.v1 import serving_pb2 as pb
from kakeya.v1.serving_pb2_grpc import ServingServiceServicer, add_ServingServiceServicer_to_server
from kakeya.wire import beats
from tests.dispatch.peers.world import QuotedToy, ServingNode, ToyEncoder, ToyModels, facts_of
from tests.sessions.toy import expected
from tests.waiting import until

PROMPT = [5, 6, 7]
NORMAL = GenerationPriority.NORMAL
TYPED = [
    *(errors.InvalidArgument, errors.Unsupported, errors.NotFound, errors.PlacementError),
    *(errors.Conflict, errors.Refused, errors.QueueFull, errors.CapacityExhausted),
    *(errors.MemoryRefused, errors.DrainTimeout, errors.KvRefused, errors.LeaseRefused),
    *(errors.DeadlineExceeded, errors.ModelLoading, errors.Cancelled, errors.Denied),
    *(errors.PeerUnavailable, errors.PeerProtocol, errors.LoadFailed, errors.StoreFailed),
]


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is late on a busy machine."""
    monkeypatch.setattr(client, "_SHORT_S", 60.0)


@pytest.fixture
def model() -> QuotedToy:
    return QuotedToy()


@pytest.fixture
async def node(model: QuotedToy, tmp_path: Path) -> AsyncIterator[ServingNode]:
    models = ToyModels((model,), (ToyEncoder("encoder"),))
    async with ServingNode(models, tmp_path / "texts").serving() as serving:
        yield serving


def asked(max_tokens: int = 5, **others: object) -> DecodeRequest:
    return DecodeRequest(token_ids=PROMPT, max_tokens=max_tokens, **others)  # type: ignore[arg-type]


async def frames_of(
    node: ServingNode, request: DecodeRequest, *, model_id: str = "toy", client: str = ""
) -> list[Frame]:
    return [frame async for frame in node.calls.decode(model_id, client, request, "auto")]


def ids(frames: list[Frame]) -> list[int]:
    return [token for frame in frames if isinstance(frame, Tokens) for token in frame.token_ids]


# --- decode


async def test_the_frames_of_a_generation_come_in_order(node: ServingNode) -> None:
    sampling = Sampling(temperature=0.8, seed=11)
    frames = await frames_of(node, asked(9, sampling=sampling))
    assert isinstance(frames[0], Progress)
    assert ids(frames) == expected(PROMPT, 9, sampling=sampling)[0]
    *_, done = frames
    assert isinstance(done, Done)
    assert (done.reason, done.usage.drafted) == (StopReason.MAX_TOKENS, 3)
    assert [frame for frame in frames if isinstance(frame, Done)] == [done]
    await until(lambda: not node.running)
    assert node.service.served == 1


async def test_a_request_comes_as_the_model_of_the_peer_would_be_asked(
    node: ServingNode, model: QuotedToy
) -> None:
    request = asked(
        kv_key="front/c1",
        client="a machine",
        user="u",
        cuts=(1, 2),
        priority=GenerationPriority.HIGH,
        kv_retention=Retention.SHORT,
        stay_warm_s=30.0,
        stop_token_ids=frozenset({0}),
        grammar="start: /a+/",
        deadline_s=9.0,
    )
    await frames_of(node, request, client="owner")
    (came,) = model.requests
    drafts = (DraftSource(kind="ngram"),)
    assert came == replace(request, kv_key="owner|front/c1", draft_sources=drafts, wait=came.wait)
    assert node.router.policies == ["auto"]


async def test_a_name_for_shares_opens_no_adapter(node: ServingNode, model: QuotedToy) -> None:
    """A caller may give itself any such name; whose certificate it showed is told apart."""
    with pytest.raises(Denied):
        await frames_of(node, asked(client="owner"), model_id="toy:private")
    await frames_of(node, asked(client="any name"), model_id="toy:private", client="owner")
    assert model.clients == ["owner"]
    assert model.requests[-1].client == "any name"


async def test_there_are_signs_of_life_with_the_wait(
    node: ServingNode, model: QuotedToy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beats, "BEAT_S", 0.01)
    monkeypatch.setattr(beats, "SILENT_S", 5.0)
    model.gate = asyncio.Event()
    model.waits = RequestWait(reason=WaitReason.PLACE, model_id="toy", position=2, seconds=3.5)
    teller = WaitTeller(lambda: None)
    async with aclosing(node.calls.decode("toy", "", asked(2, wait=teller), "auto")) as frames:
        assert isinstance(await anext(frames), Progress)
        coming = asyncio.ensure_future(anext(frames))
        await until(lambda: teller.ask() == model.waits)
        model.waits = None
        await until(lambda: teller.ask() is None)
        model.waits = RequestWait(reason=WaitReason.HELD, model_id="toy")
        await until(lambda: teller.ask() == model.waits)
        assert not coming.done()
        model.gate.set()
        assert isinstance(await coming, Tokens)
        assert teller.ask() is None, "the answer has begun"


async def test_beats_lose_no_frame(
    node: ServingNode, model: QuotedToy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beats, "BEAT_S", 0.001)
    model.gate = asyncio.Event()
    task = asyncio.ensure_future(frames_of(node, asked(20)))
    while not task.done():
        model.gate.set()
        await asyncio.sleep(0.003)
    assert ids(task.result()) == expected(PROMPT, 20)[0]


@pytest.mark.parametrize("begun", [False, True])
async def test_a_caller_that_leaves_ends_the_generation_at_once(
    node: ServingNode, model: QuotedToy, begun: bool
) -> None:
    model.gate = asyncio.Event()
    frames = node.calls.decode("toy", "", asked(50), "auto")
    await anext(frames)
    if begun:
        model.gate.set()
        await anext(frames)
    await frames.aclose()
    await until(lambda: model.closed_early == 1)
    await until(lambda: not node.running)


async def test_a_cancelled_caller_ends_the_generation(node: ServingNode, model: QuotedToy) -> None:
    model.gate = asyncio.Event()
    task = asyncio.ensure_future(frames_of(node, asked(50)))
    await until(lambda: model.requests)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: model.closed_early == 1)


@pytest.mark.parametrize("kind", TYPED, ids=lambda kind: kind.__name__)
async def test_an_error_comes_back_as_the_same_type(
    node: ServingNode, model: QuotedToy, kind: type[KakeyaError]
) -> None:
    model.fails = kind("as the model says")
    model.fails.retry_after_s = 7.0
    with pytest.raises(KakeyaError, match="mini: as the model says") as caught:
        await frames_of(node, asked())
    assert type(caught.value) is kind
    assert caught.value.retry_after_s == 7.0
    assert not node.running


async def test_an_error_in_the_middle_comes_behind_the_tokens(
    node: ServingNode, model: QuotedToy
) -> None:
    model.fail_after = 3
    frames = node.calls.decode("toy", "", asked(9), "auto")
    got = [await anext(frames) for _ in range(4)]
    with pytest.raises(PeerUnavailable, match="toy engine is gone") as caught:
        await anext(frames)
    assert ids(got) == expected(PROMPT, 3)[0]
    assert caught.value.retry_after_s == 2.0


async def test_an_unknown_model_and_torn_ids_are_refused(node: ServingNode) -> None:
    with pytest.raises(NotFound, match="no model 'other' is served here"):
        await frames_of(node, asked(), model_id="other")
    call = node.channel.unary_stream(
        "/kakeya.v1.ServingService/Decode",
        request_serializer=pb.RoutedDecodeRequest.SerializeToString,
        response_deserializer=pb.RoutedDecodeResponse.FromString,
    )
    torn = engine_pb2.DecodeRequest(token_ids_le32=b"12345", max_tokens=1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(pb.RoutedDecodeRequest(model_id="toy", request=torn)).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_node_that_drains_takes_nothing_new_and_ends_what_it_has(
    node: ServingNode, model: QuotedToy
) -> None:
    model.gate = asyncio.Event()
    task = asyncio.ensure_future(frames_of(node, asked(2)))
    await until(lambda: model.requests)
    node.service.drain("an update")
    with pytest.raises(Refused, match="mini: this node takes no requests: an update"):
        await frames_of(node, asked())
    with pytest.raises(Refused, match="an update"):
        await node.calls.quote("toy", "", PROMPT, (), 60.0)
    while not task.done():
        model.gate.set()
        await asyncio.sleep(0)
    assert ids(task.result()) == expected(PROMPT, 2)[0]


async def test_a_node_that_drains_loads_nothing_and_tells_what_it_knows(
    node: ServingNode, model: QuotedToy
) -> None:
    node.service.drain("an update")
    assert (await node.calls.describe("toy", "", 1.0, NORMAL)).facts == model.facts
    model.facts = None
    with pytest.raises(Refused, match="an update"):
        await node.calls.describe("toy", "", 1.0, NORMAL)
    with pytest.raises(Refused, match="an update"):
        await node.calls.embed("encoder", [[1]], 0)
    assert model.loads == node.models.encoders[0].asked == []


# --- peers that are lost


async def test_a_silent_peer_is_unavailable(
    node: ServingNode, model: QuotedToy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beats, "BEAT_S", 100.0)
    model.gate = asyncio.Event()
    frames = node.calls.decode("toy", "", asked(3), "auto")
    assert isinstance(await anext(frames), Progress)
    monkeypatch.setattr(beats, "SILENT_S", 0.2)
    with pytest.raises(PeerUnavailable, match=r"mini: nothing was heard of the answer for 0\.2 s"):
        await anext(frames)
    await until(lambda: model.closed_early == 1)


async def test_a_node_that_goes_away_is_unavailable(node: ServingNode, model: QuotedToy) -> None:
    model.gate = asyncio.Event()
    frames = node.calls.decode("toy", "", asked(3), "auto")
    await anext(frames)
    await node.server.stop(None)
    with pytest.raises(PeerUnavailable):
        await anext(frames)


async def test_a_channel_that_is_closed_is_a_lost_node_and_no_cancellation(
    node: ServingNode, model: QuotedToy
) -> None:
    model.gate = asyncio.Event()
    frames = node.calls.decode("toy", "", asked(3), "auto")
    await anext(frames)
    coming = asyncio.ensure_future(anext(frames))
    await asyncio.sleep(0.01)
    await node.channel.close()
    with pytest.raises(PeerUnavailable, match="the channel was closed"):
        await coming
    with pytest.raises(PeerUnavailable, match="the channel was closed"):
        await frames_of(node, asked())


async def test_a_stream_that_ends_without_its_last_frame_is_a_broken_protocol() -> None:
    class Short(ServingServiceServicer):
        async def Decode(self, request, context):  # type: ignore[no-untyped-def]
            tokens = engine_pb2.CommittedTokens(token_ids=[1])
            yield pb.RoutedDecodeResponse(frames=engine_pb2.DecodeResponse(tokens=tokens))

    server = grpc.aio.server()
    add_ServingServiceServicer_to_server(Short(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            frames = PeerCalls(channel, "mini").decode("toy", "", asked(), "auto")
            assert await anext(frames) == Tokens(token_ids=(1,))
            with pytest.raises(PeerProtocol, match="ended without a done frame"):
                await anext(frames)
    finally:
        await server.stop(None)


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type)
        and issubclass(kind, errors.KakeyaError)
        and kind not in (errors.KakeyaError, errors.Cancelled)  # the caller left: none is there
    ],
)
async def test_the_errors_of_a_node_come_as_they_are(
    node: ServingNode, model: QuotedToy, kind: type[errors.KakeyaError]
) -> None:
    is_law = issubclass(kind, errors.InvariantBroken)
    raised = kind("law", "what") if is_law else kind("law: what")
    raised.retry_after_s = 0.25
    if isinstance(raised, errors.InvalidArgument):
        raised.param = "prompt"
    model.fails, model.facts = raised, None
    for calling in (frames_of(node, asked()), node.calls.describe("toy", "", 1.0, NORMAL)):
        with pytest.raises(kind) as caught:
            await calling
        assert type(caught.value) is kind
        assert caught.value.message == "mini: law: what"
        assert caught.value.retry_after_s == 0.25
        assert getattr(caught.value, "param", "prompt") == "prompt"


async def test_an_older_node_knows_no_method() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            calls = PeerCalls(channel, "old")
            with pytest.raises(UnknownMethod, match="old: "):
                await calls.quote("toy", "", PROMPT, (), 60.0)
            with pytest.raises(UnknownMethod):
                await anext(calls.decode("toy", "", asked(), "auto"))
            with pytest.raises(UnknownMethod):
                await calls.describe("toy", "", 1.0, NORMAL)
    finally:
        await server.stop(None)


class _Odd(ServingServiceServicer):
    async def WatchNode(  # type: ignore[override]
        self, request: pb.WatchNodeRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> None:
        for told in (b"[NaN, 1]", b"[" * 100_000):
            await context.write(pb.WatchNodeResponse(section="odd", json=told))


async def test_what_a_node_tells_of_itself_is_json_or_an_error() -> None:
    server = grpc.aio.server()
    add_ServingServiceServicer_to_server(_Odd(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            async with aclosing(PeerCalls(channel, "odd").watch()) as told:
                assert await anext(told) == ("odd", [None, 1])
                with pytest.raises(PeerProtocol, match="odd: what it tells is no JSON"):
                    await anext(told)
    finally:
        await server.stop(None)


async def test_the_first_frames_say_what_computes_them(node: ServingNode, model: QuotedToy) -> None:
    told: list[AnswerOrigin] = []
    frames = node.calls.decode("toy", "", asked(), "auto", begun=told.append)
    _ = [frame async for frame in frames]
    assert told == [origin_of(model.facts)]
    assert told[0].weights
    model.facts = facts_of(base_fingerprint="")
    assert origin_of(model.facts).weights == "", "sizes alone name no weights"


# --- the other calls


async def test_a_quote_tells_how_a_request_would_be_served(
    node: ServingNode, model: QuotedToy
) -> None:
    model.load = RequestLoad(answers=(0, 0), waiting=1, waiting_tokens=300)
    model.held = 2
    quote = await node.calls.quote("toy", "", PROMPT, (1,), 60.0)
    assert (quote.is_ready, quote.load, quote.cached_tokens) == (True, model.load, 2)
    assert (quote.prefill_tokens_per_s, quote.tokens_per_s) == (1000.0, 100.0)
    assert quote.origin.weights
    assert quote.origin.numerics
    model.state, model.load_s, model.refusal = ModelState.UNLOADED, None, "no room"
    quote = await node.calls.quote("toy", "", PROMPT, (), 60.0)
    assert (quote.is_ready, quote.load_s, quote.refusal) == (False, None, "no room")
    model.facts = None
    quote = await node.calls.quote("toy", "", PROMPT, (), 60.0)
    assert (quote.is_ready, quote.origin.weights) == (False, "")
    assert model.loads == []
    with pytest.raises(InvalidArgument, match="makes vectors"):
        await node.calls.quote("encoder", "", PROMPT, (), 60.0)


async def test_a_description_has_facts_and_manifest_and_may_load(
    node: ServingNode, model: QuotedToy
) -> None:
    model.manifest = Manifest(temperature=0.3, max_tokens=64, thinking="off")
    told = await node.calls.describe("toy", "", 1.0, NORMAL)
    assert (told.facts, told.manifest, told.text_digest) == (model.facts, model.manifest, "")
    assert model.loads == []
    model.facts = None
    told = await node.calls.describe("toy", "", 3.0, GenerationPriority.BATCH)
    assert told.facts == facts_of()
    assert model.loads == [(3.0, GenerationPriority.BATCH)]
    with pytest.raises(Denied):
        await node.calls.describe("toy:private", "", 1.0, NORMAL)
    assert (await node.calls.describe("encoder", "", 1.0, NORMAL)).facts == facts_of()


async def test_the_text_of_a_model_comes_in_parts(
    node: ServingNode, model: QuotedToy, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    model.facts = facts_of(model_path=str(tmp_path))
    assert (await node.calls.describe("toy", "", 1.0, NORMAL)).text_digest
    assert [part async for part in node.calls.text_files("toy", "")] == [("tokenizer.json", b"{}")]
    model.facts = None
    with pytest.raises(Refused, match="was not loaded here yet"):
        await anext(node.calls.text_files("toy", ""))


async def test_a_release_forgets_what_a_decode_kept(node: ServingNode, model: QuotedToy) -> None:
    await frames_of(node, asked(kv_key="front/c1"), client="owner")
    assert list(model.caches) == ["owner|front/c1"]
    await node.calls.release("toy", "owner", "front/c1")
    assert model.released == ["owner|front/c1"]
    assert model.caches == {}


async def test_a_turn_is_warmed_under_the_claim_of_its_conversation(node: ServingNode) -> None:
    history = marked([1, 2, 3, 4], (2,))
    await node.calls.warm_turn("toy", "owner", "front/c1", history, Retention.SHORT)
    ((claim, tokens),) = node.precache.ended
    assert node.precache.kv_key(claim) == "owner|front/c1"
    assert (claim.model_id, claim.use.retention) == ("toy", Retention.SHORT)
    assert await tokens() == history


async def test_adapters_are_listed_for_the_client_that_may_name_them(node: ServingNode) -> None:
    listed = (AdaptedId(model_id="toy:private", parent="toy"),)
    assert await node.calls.adapted("owner", 60.0) == listed
    assert await node.calls.adapted("another", 60.0) == ()
    node.service.drain("it is taken out")
    assert await node.calls.adapted("owner", 60.0) == ()


async def test_vectors_come_from_an_encoder(node: ServingNode) -> None:
    vectors, weights = await node.calls.embed("encoder", [[1, 2], [3]], 8)
    assert (vectors, weights) == (bytes([2, 1]), origin_of(facts_of()).weights)
    assert node.models.encoders[0].asked == [([[1, 2], [3]], 8)]
    node.models.encoders[0].fails = errors.QueueFull("too many wait", retry_after_s=2.0)
    with pytest.raises(errors.QueueFull) as caught:
        await node.calls.embed("encoder", [[1]], 0)
    assert caught.value.retry_after_s == 2.0


async def test_a_copy_of_an_answer_is_held_for_a_peer(node: ServingNode) -> None:
    copy = AnswerCopy(
        answer_id="resp_1",
        client="ann",
        model_id="toy",
        body=b"{}",
        created_at=7,
        request=asked(9, kv_key="k", draft_sources=(DraftSource(kind="ngram"),)),
        frames=[Tokens(token_ids=(1, 2))],
    )
    await node.calls.hold_answer(copy, 0)
    with pytest.raises(NotFound, match="mini"):
        await node.calls.hold_answer(copy, 7)
    await node.calls.hold_answer(replace(copy, frames=[Tokens(token_ids=(3,))]), 1)
    with pytest.raises(NotFound):
        await node.calls.find_answer("resp_1", "bob", forget=False)
    found = await node.calls.find_answer("resp_1", "ann", forget=True)
    assert found.frames == [Tokens(token_ids=(1, 2)), Tokens(token_ids=(3,))]
    assert found.request == replace(asked(9), token_ids=list(PROMPT))
    with pytest.raises(NotFound):
        await node.calls.find_answer("resp_1", "ann", forget=False)
