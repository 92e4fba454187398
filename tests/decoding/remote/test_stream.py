"""Drafts over a stream, against real servers: the same tokens, whatever a peer does."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any
from unittest import mock

import grpc
import grpc.aio
import pytest

from kakeya.core.units import pack_ids
from kakeya.decoding.draft.decoder import Decoding
from kakeya.decoding.draft.proposer import Draft, SamplingNoise
from kakeya.decoding.draft.states import HiddenStates
from kakeya.decoding.ngram.ngram import ROLLBACK, NGramIndex, NGramProposer
from kakeya.decoding.remote.breaker import BreakerState
from kakeya.decoding.remote.draft_book import RemoteDraftBook
from kakeya.decoding.remote.remote import MalformedDraft, RemoteProposer, RemoteProposerError
from kakeya.decoding.remote.stream import RETRY_S, StreamedDraft, StreamedPeer
from kakeya.decoding.serve.service import ProposerService
from kakeya.decoding.serve.stream_service import DraftStreamService, StreamLimits
from kakeya.v1 import distributed_pb2, drafts_pb2
from kakeya.v1.distributed_pb2_grpc import ProposerServiceServicer
from kakeya.v1.drafts_pb2_grpc import (
    DraftStreamServiceServicer,
    DraftStreamServiceStub,
    add_DraftStreamServiceServicer_to_server,
)
from tests.decoding.servers import serving
from tests.decoding.toys import VOCAB, HashModel
from tests.memory.worlds import ManualClock
from tests.waiting import wait_until

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
PATIENCE_S = 60.0


def ngrams(**limits: float) -> tuple[ProposerService, DraftStreamService]:
    proposers = ProposerService({"ngram": NGramProposer()})
    return proposers, DraftStreamService(proposers, limits=StreamLimits(**limits))


def connected(proposer: RemoteProposer) -> RemoteProposer:
    """The proposer, once it has its connection: calls fail where that takes more than 2 s."""
    unknown: Any = proposer._channel.unary_unary("/no/method")
    with suppress(grpc.RpcError):
        unknown(b"", PATIENCE_S, wait_for_ready=True)
    return proposer


@contextmanager
def proposing(
    address: str, *, timeout_s: float = PATIENCE_S, **more: Any
) -> Iterator[RemoteProposer]:
    proposer = RemoteProposer(address, "ngram", timeout_s=timeout_s, rng=random.Random(1), **more)
    try:
        yield connected(proposer)
    finally:
        proposer.close()


@contextmanager
def streaming(proposer: RemoteProposer, prompt: Sequence[int] = PROMPT) -> Iterator[StreamedPeer]:
    """A peer whose stream is open."""
    peer = StreamedPeer(proposer)
    peer.prepare(prompt, noise=None)
    wait_until("a stream is open", lambda: peer._stream is not None and peer._stream.is_open)
    try:
        yield peer
    finally:
        peer.leave()


def ask(peer: StreamedPeer, prefix: list[int], size: int = 8) -> Draft:
    pending = peer.begin(prefix, size, noise=None)
    assert pending is not None
    pending.wait(PATIENCE_S)
    return peer.finish(pending)


def generate(peer: object, count: int) -> list[int]:
    """The step loop of an engine, in small."""
    book = RemoteDraftBook(peer)
    state = Decoding(PROMPT, max_tokens=count, stop_token_ids=frozenset(), context_tokens=9999)
    book.prepare(state.history)
    model = HashModel(order=1)
    while state.finish is None:
        size = min(8, state.room())
        draft = book.poll(state.history, size, wait_s=1.0).tokens if size else ()
        if draft:
            book.ahead(state.history, draft)
        state.commit(draft, model.verify(state.history, draft))
        book.follow(state.history)
    book.close()
    return state.history[len(PROMPT) :]


# What a stream drafts


def test_a_stream_drafts_what_a_fresh_index_of_the_same_text_would() -> None:
    """Whatever was assumed and taken back before."""
    rng = random.Random(5)
    with serving(*ngrams()) as address, proposing(address) as proposer:
        text = [rng.randrange(6) for _ in range(700)]
        with streaming(proposer, text) as peer:
            for _ in range(150):
                cut = rng.choice((0, 0, 1, 8, ROLLBACK))
                grown = cut + rng.choice((0, 1, 9, 100))
                text = text[: len(text) - cut] + [rng.randrange(6) for _ in range(grown)]
                fresh = NGramIndex()
                fresh.extend(text)
                draft = ask(peer, text)
                assert list(draft.tokens) == fresh.draft(8)[0]
                assert draft.match_length >= fresh.draft(8)[1] > 0


def test_generations_are_the_same_with_a_stream_without_one_and_without_drafts() -> None:
    plain = HashModel(order=1).plain(PROMPT, 300)
    for services in (ngrams(), ngrams()[:1]):
        with serving(*services) as address, proposing(address) as proposer:
            assert generate(StreamedPeer(proposer), 300) == plain
            assert proposer.stats.failures == 0
            assert proposer.stats.drafted > 0


def test_a_peer_without_streams_is_asked_by_calls_and_not_tried_again() -> None:
    with serving(ngrams()[0]) as address, proposing(address) as proposer:
        peer = StreamedPeer(proposer)
        assert ask(peer, [1, 2, 1, 2, 1]).tokens[:2] == (2, 1)
        wait_until("no more streams", lambda: not proposer.may_stream())
        assert not isinstance(peer.begin([1, 2], 4, noise=None), StreamedDraft)
        assert (proposer.stats.failures, proposer.breaker.state) == (0, BreakerState.CLOSED)


def test_a_request_on_a_stream_that_the_peer_turns_out_not_to_have_is_no_failure() -> None:
    """gRPC tells of metadata before it tells that the peer lacks the method."""
    has_asked = threading.Event()

    class Refused(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.UNIMPLEMENTED

    class Call(Refused):
        def initial_metadata(self) -> tuple[()]:
            return ()

        def cancel(self) -> None:
            pass

        def __iter__(self) -> Iterator[object]:
            has_asked.wait(PATIENCE_S)
            raise Refused

    with serving(ngrams()[0]) as address, proposing(address) as proposer:
        call: Any = Call()
        with (
            mock.patch.object(proposer, "stream", return_value=call),
            streaming(proposer, [1, 2]) as peer,
        ):
            pending = peer.begin([1, 2, 1], 4, noise=None)
            assert isinstance(pending, StreamedDraft)
            has_asked.set()
            assert pending.wait(PATIENCE_S)
            assert peer.finish(pending).tokens == ()
        assert (proposer.stats.failures, proposer.breaker.state) == (0, BreakerState.CLOSED)
        assert proposer._streams_from_mono > proposer.clock.mono() + RETRY_S


def test_a_plain_peer_is_never_offered_a_stream() -> None:
    with serving(*ngrams()) as address, proposing(address, extended=False) as proposer:
        peer = StreamedPeer(proposer)
        peer.prepare(PROMPT, noise=None)
        assert peer._stream is None


class Model:
    """A draft model elsewhere, whose first drafts take for ever."""

    def __init__(self, hanging: int) -> None:
        self.hanging = hanging
        self.asked: list[tuple[list[int], int | None, float]] = []
        self.cancelled = 0

    async def draft(
        self,
        prefix: Sequence[int],
        size: int,
        *,
        seed: int | None,
        temperature: float,
        num_steps: int,
        states: HiddenStates | None,
    ) -> Draft:
        self.asked.append((list(prefix), seed, temperature))
        if len(self.asked) <= self.hanging:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled += 1
        return Draft(source="m", tokens=(prefix[-1],) * size, forward_passes=size)


def test_a_draft_model_gets_text_and_noise_and_is_stopped_when_overtaken() -> None:
    model = Model(hanging=1)
    proposers = ProposerService({"ngram": model})
    with (
        serving(proposers, DraftStreamService(proposers)) as address,
        proposing(address) as proposer,
    ):
        peer = StreamedPeer(proposer)
        noise = SamplingNoise(seed=-7, temperature=0.5)
        peer.prepare([1, 2], noise=noise)
        wait_until("a stream is open", lambda: peer._stream is not None and peer._stream.is_open)
        first = peer.begin([1, 2, 3, 4], 2, noise=noise)
        wait_until("it is asked", lambda: len(model.asked) == 1)
        assert first is not None
        peer.abandon(first)
        second = peer.begin([1, 2, 9], 2, noise=noise)
        assert second is not None
        assert second.wait(PATIENCE_S)
        assert peer.finish(second).tokens == (9, 9)
        assert model.cancelled == 1
        seed = -7 & ((1 << 64) - 1)
        assert model.asked == [([1, 2, 3, 4], seed, 0.5), ([1, 2, 9], seed, 0.5)]
        assert first.arrived_mono is None
        peer.leave()


# What a server allows


@asynccontextmanager
async def served(
    service: DraftStreamServiceServicer,
) -> AsyncIterator[DraftStreamServiceStub]:
    server = grpc.aio.server()
    add_DraftStreamServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield DraftStreamServiceStub(channel)
    await server.stop(0)


def told(
    version: int, keep: int, *tokens: int, size: int = 4, model: str = ""
) -> drafts_pb2.DraftStreamRequest:
    return drafts_pb2.DraftStreamRequest(
        version=version,
        keep_tokens=keep,
        append_ids_le32=pack_ids(tokens),
        size=size,
        model_id=model,
    )


def stated(**states: object) -> drafts_pb2.DraftStreamRequest:
    message = told(6, 200, 1)
    message.states.CopyFrom(drafts_pb2.HiddenStates(**states))  # type: ignore[arg-type]
    return message


FIRST = told(5, 0, *([1, 2] * 100))


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        (told(5, 200, 1), grpc.StatusCode.INVALID_ARGUMENT),
        (told(6, 201, 1), grpc.StatusCode.INVALID_ARGUMENT),
        (told(6, 200 - ROLLBACK - 1, 1), grpc.StatusCode.INVALID_ARGUMENT),
        (told(6, 200, 1, size=1025), grpc.StatusCode.INVALID_ARGUMENT),
        (
            drafts_pb2.DraftStreamRequest(version=6, keep_tokens=200, append_ids_le32=b"abc"),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (stated(first=200, width=2, data_f16=b"1234" * 2), grpc.StatusCode.INVALID_ARGUMENT),
        (stated(first=0, width=2, data_f16=b"123"), grpc.StatusCode.INVALID_ARGUMENT),
        (stated(first=0, width=0, data_f16=b""), grpc.StatusCode.INVALID_ARGUMENT),
        (told(6, 200, *([1] * 101)), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
async def test_what_cannot_follow_ends_the_stream_and_frees_what_it_held(
    wrong: drafts_pb2.DraftStreamRequest, status: grpc.StatusCode
) -> None:
    service = ngrams(tokens=300)[1]
    async with served(service) as stub:
        call = stub.DraftStream(timeout=60)
        await call.write(FIRST)
        assert list((await call.read()).draft.token_ids) == [1, 2, 1, 2]
        assert (service.streams, service.held_tokens) == (1, 200)
        await call.write(wrong)
        assert await call.code() is status
        assert (service.streams, service.held_tokens) == (0, 0)


async def test_a_text_without_room_is_told_when_one_is_expected_to_end() -> None:
    clock = ManualClock()
    proposers = ProposerService({"ngram": NGramProposer()})
    service = DraftStreamService(proposers, clock=clock, limits=StreamLimits(tokens=300))
    async with served(service) as stub:

        async def opened() -> grpc.aio.StreamStreamCall:
            call = stub.DraftStream(timeout=PATIENCE_S)
            await call.write(FIRST)
            return call

        for _ in range(2):
            call = await opened()
            await call.read()
            clock.advance(7)
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.OK
        call = await opened()
        await call.read()
        for expected in ("7", "14"):  # a stream that is refused makes no room for others
            refused = await opened()
            assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert dict(await refused.trailing_metadata())["retry-after"] == expected
        call.cancel()


async def test_what_was_taken_back_cannot_be_taken_back_again() -> None:
    async with served(ngrams()[1]) as stub:
        call = stub.DraftStream(timeout=60)
        for message in (FIRST, told(6, 200 - ROLLBACK, size=0), told(7, 150 - ROLLBACK, 1)):
            await call.write(message)
        await call.read()
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "0 tokens" in await call.details()


async def test_an_unknown_proposer_and_an_empty_stream_hold_nothing() -> None:
    service = ngrams()[1]
    async with served(service) as stub:
        call = stub.DraftStream(timeout=60)
        await call.write(told(1, 0, 1, model="nobody"))
        assert await call.code() is grpc.StatusCode.NOT_FOUND
        call = stub.DraftStream(timeout=60)
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
        assert service.streams == 0


async def test_a_silent_stream_is_ended() -> None:
    service = ngrams(idle_s=0.1)[1]
    async with served(service) as stub:
        call = stub.DraftStream(timeout=60)
        await call.write(FIRST)
        await call.read()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        assert (service.streams, service.held_tokens) == (0, 0)


async def test_a_node_that_stops_ends_its_streams_and_takes_no_more() -> None:
    service = ngrams()[1]
    async with served(service) as stub:
        call = stub.DraftStream(timeout=60)
        await call.write(FIRST)
        await call.read()
        service.drain()
        assert await call.read() is grpc.aio.EOF
        late = stub.DraftStream(timeout=60)
        assert await late.read() is grpc.aio.EOF
        assert await late.code() is grpc.StatusCode.OK
        assert (service.streams, service.held_tokens) == (0, 0)


async def test_one_peer_has_so_many_streams_and_a_place_is_free_when_one_ends() -> None:
    service = ngrams(streams_per_peer=2)[1]
    async with served(service) as stub:
        calls = [stub.DraftStream(timeout=60) for _ in range(2)]
        for call in calls:
            await call.write(FIRST)
            await call.read()
        refused = stub.DraftStream(timeout=60)
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        calls[0].cancel()
        async with asyncio.timeout(PATIENCE_S):
            while service.streams != 1:
                await asyncio.sleep(0.005)
        call = stub.DraftStream(timeout=60)
        await call.write(FIRST)
        assert list((await call.read()).draft.token_ids) == [1, 2, 1, 2]


# What a peer may do


class Rude(DraftStreamServiceServicer):
    """Takes every stream, and answers each request in its own way."""

    def __init__(self, answer: Callable[[drafts_pb2.DraftStreamRequest], list[object]]) -> None:
        self.answer = answer

    async def DraftStream(self, requests, context):
        await context.send_initial_metadata(())
        async for message in requests:
            if message.size:
                for response in self.answer(message):
                    if response is None:
                        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
                    await context.write(response)


def saying(version: int, *tokens: int) -> drafts_pb2.DraftStreamResponse:
    draft = distributed_pb2.ProposeBlockResponse(token_ids=tokens, num_valid=len(tokens))
    return drafts_pb2.DraftStreamResponse(version=version, draft=draft)


RUDE: dict[str, Callable[[drafts_pb2.DraftStreamRequest], list[object]]] = {
    "nothing": lambda m: [],
    "wrong tokens": lambda m: [saying(m.version, *[0] * m.size)],
    "ids beyond the vocabulary": lambda m: [saying(m.version, *[VOCAB] * m.size)],
    "too many": lambda m: [saying(m.version, *[1] * 65)],
    "what nobody asked": lambda m: [saying(m.version + 1, 1)],
    "the same again and again": lambda m: [saying(m.version, 1)] * 1000,
    "an end": lambda m: [None],
    "an empty message": lambda m: [drafts_pb2.DraftStreamResponse()],
}


class Abstaining(ProposerServiceServicer):
    """What the same node answers by calls."""

    async def ProposeBlock(self, request, context):
        return distributed_pb2.ProposeBlockResponse(num_valid=0)


@pytest.mark.parametrize("habit", RUDE)
def test_a_rude_peer_costs_time_and_never_a_token(habit: str) -> None:
    plain = HashModel(order=1).plain(PROMPT, 60)
    with (
        serving(Abstaining(), Rude(RUDE[habit])) as address,
        proposing(address, vocab_size=VOCAB, timeout_s=0.2) as proposer,
    ):
        with streaming(proposer) as peer:
            assert generate(peer, 60) == plain
        wait_until(
            "the thread ends", lambda: "draft-stream" not in {t.name for t in threading.enumerate()}
        )


@pytest.mark.parametrize(
    ("habit", "failure"),
    [
        ("nothing", RemoteProposerError),
        ("ids beyond the vocabulary", MalformedDraft),
        ("what nobody asked", MalformedDraft),
        ("an end", RemoteProposerError),
    ],
)
def test_a_failure_counts_ends_the_stream_and_is_followed_by_calls(
    habit: str, failure: type[RemoteProposerError]
) -> None:
    with (
        serving(Abstaining(), Rude(RUDE[habit])) as address,
        # Of the peer's silence alone is the end waited for.
        proposing(
            address, vocab_size=VOCAB, timeout_s=0.2 if habit == "nothing" else PATIENCE_S
        ) as proposer,
        streaming(proposer) as peer,
    ):
        pending = peer.begin([*PROMPT, 1], 4, noise=None)
        assert isinstance(pending, StreamedDraft)
        wait_until("an answer comes", lambda: pending.arrived_mono is not None)
        with pytest.raises(failure):
            peer.finish(pending)
        assert proposer.stats.failures == 1
        assert not proposer.may_stream()
        proposer.timeout_s = PATIENCE_S
        following = peer.begin([*PROMPT, 1, 2], 4, noise=None)
        assert following is not None
        assert not isinstance(following, StreamedDraft)
        assert following.wait(PATIENCE_S)
        assert peer.finish(following).tokens == ()


def test_a_server_that_is_lost_in_the_middle_of_a_generation_costs_its_drafts_only() -> None:
    services = ngrams()
    with proposing_to_a_lost_server(services) as peer:
        with pytest.raises(RemoteProposerError):
            ask(peer, [*PROMPT, 1])
        pending = peer.begin([*PROMPT, 1, 2], 4, noise=None)
        assert not isinstance(pending, StreamedDraft)


@contextmanager
def proposing_to_a_lost_server(
    services: tuple[ProposerService, DraftStreamService],
) -> Iterator[StreamedPeer]:
    with ExitStack() as kept:
        with serving(*services) as address:
            proposer = kept.enter_context(proposing(address, timeout_s=0.5))
            peer = kept.enter_context(streaming(proposer))
        yield peer


def test_a_generation_that_ends_leaves_no_thread_and_no_stream() -> None:
    services = ngrams()
    with serving(*services) as address, proposing(address) as proposer:
        for _ in range(5):
            with streaming(proposer):
                pass
        wait_until(
            "the thread ends", lambda: "draft-stream" not in {t.name for t in threading.enumerate()}
        )
        wait_until("the peer has no stream", lambda: services[1].streams == 0)
        assert services[1].held_tokens == 0
