from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence

import grpc
import grpc.aio
import pytest

from kakeya.core.errors import InvalidArgument, PeerUnavailable, QueueFull
from kakeya.core.units import pack_ids
from kakeya.decoding.draft.convert import MAX_PREFIX_TOKENS
from kakeya.decoding.draft.proposer import BlockProposal, Draft, Proposer
from kakeya.decoding.ngram.ngram import NGramProposer
from kakeya.decoding.serve.service import AsyncDrafter, ProposerService
from kakeya.decoding.serve.stream_service import DraftStreamService, StreamLimits
from kakeya.v1 import distributed_pb2 as pb
from kakeya.v1 import distributed_pb2_grpc as rpc
from tests.decoding.toys import ToyProposer
from tests.memory.worlds import ManualClock
from tests.waiting import until

REPEATING = [1, 2, 3, 1, 2, 3]
Stub = rpc.ProposerServiceStub


@pytest.fixture
async def serve() -> AsyncIterator[Callable]:
    """Start a server for a service; returns a stub."""
    servers, channels = [], []

    async def start(service: ProposerService) -> Stub:
        server = grpc.aio.server()
        rpc.add_ProposerServiceServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        servers.append(server)
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        channels.append(channel)
        return rpc.ProposerServiceStub(channel)

    yield start
    for channel in channels:
        await channel.close()
    for server in servers:
        await server.stop(0)


def ask(prefix: Sequence[int] = REPEATING, size=4, steps=1, model="", **more):
    return pb.ProposeBlockRequest(
        committed_token_ids=prefix, block_size=size, num_steps=steps, model_id=model, **more
    )


async def status_of(call) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await call
    return refusal.value.code(), refusal.value.details()


class Gate:
    """A proposer that works until it is let go."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.asked: list[list[int]] = []
        self.now = 0
        self.most_at_once = 0

    def proposer(self) -> ToyProposer:
        def make(prefix, size):
            self.asked.append(list(prefix))
            self.now += 1
            self.most_at_once = max(self.most_at_once, self.now)
            self.entered.release()
            assert self.go.acquire(timeout=10)
            self.now -= 1
            return list(prefix)[:size]

        return ToyProposer(make)


class CountingService(ProposerService):
    """Knows how many requests are with it."""

    now = 0

    async def ProposeBlock(self, request, context):
        self.now += 1
        try:
            return await super().ProposeBlock(request, context)
        finally:
            self.now -= 1


async def test_answers_a_block_of_exactly_the_size_with_what_is_meant(serve):
    stub = await serve(ProposerService({"ngram": NGramProposer()}))
    response = await stub.ProposeBlock(ask(size=5))
    assert list(response.token_ids) == [1, 2, 3, 1, 2]
    assert response.num_valid == 5
    assert len(response.confidence) == 5
    assert (response.forward_passes, response.diffusion_steps) == (1, 0)


async def test_pads_with_0_what_is_not_known(serve):
    stub = await serve(ProposerService({"ngram": NGramProposer()}))
    response = await stub.ProposeBlock(ask([1, 2, 3]))
    assert list(response.token_ids) == [0, 0, 0, 0]
    assert response.HasField("num_valid")
    assert response.num_valid == 0


async def test_sends_no_padding_to_a_caller_that_does_not_need_it(serve):
    stub = await serve(ProposerService({"ngram": NGramProposer()}))
    response = await stub.ProposeBlock(ask([1, 2, 3], allow_short=True))
    assert not response.token_ids
    assert response.num_valid == 0


async def test_reads_packed_ids(serve):
    stub = await serve(ProposerService({"ngram": NGramProposer()}))
    response = await stub.ProposeBlock(
        ask([], committed_token_ids_le32=pack_ids(REPEATING), size=2)
    )
    assert list(response.token_ids) == [1, 2]


async def test_the_first_proposer_is_the_default(serve):
    one, two = ToyProposer(lambda p, n: [1] * n), ToyProposer(lambda p, n: [2] * n)
    stub = await serve(ProposerService({"one": one, "two": two}))
    assert list((await stub.ProposeBlock(ask(size=1))).token_ids) == [1]
    assert list((await stub.ProposeBlock(ask(size=1, model="two"))).token_ids) == [2]


async def test_a_block_has_up_to_1024_tokens_and_the_refusal_names_the_limit(serve):
    stub = await serve(ProposerService({"ngram": NGramProposer()}))
    response = await stub.ProposeBlock(ask(size=1024))
    assert len(response.token_ids) == response.num_valid == 1024
    code, words = await status_of(stub.ProposeBlock(ask(size=1025)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert words == "block_size is 1025, it must be 1 to 1024"


async def test_an_unknown_model_is_not_found_and_the_served_ones_are_named(serve):
    stub = await serve(ProposerService({"one": NGramProposer(), "two": NGramProposer()}))
    code, words = await status_of(stub.ProposeBlock(ask(model="three")))
    assert code is grpc.StatusCode.NOT_FOUND
    assert "three" in words
    assert "one, two" in words
    code, words = await status_of(stub.ProposeBlock(ask(model="\N{PILE OF POO}" * 10_000)))
    assert code is grpc.StatusCode.NOT_FOUND
    assert "one, two" in words


async def test_the_steps_of_a_request_reach_the_proposer(serve):
    toy = ToyProposer(lambda p, n: [1] * n)
    stub = await serve(ProposerService({"toy": toy}))
    await stub.ProposeBlock(ask(steps=16))
    assert toy.asked_steps == [16]


async def test_whatever_proposes_blocks_is_served(serve):
    class Blocks:
        def propose_block(self, committed_token_ids, block_size, num_steps):
            return BlockProposal(
                tokens=(7,) * block_size,
                num_valid=block_size,
                diffusion_steps=num_steps,
                forward_passes=num_steps,
                peak_activation_bytes=99,
            )

    stub = await serve(ProposerService({"blocks": Blocks()}))
    response = await stub.ProposeBlock(ask(size=3, steps=5))
    assert list(response.token_ids) == [7, 7, 7]
    assert (response.diffusion_steps, response.forward_passes) == (5, 5)
    assert response.peak_activation_bytes == 99


@pytest.mark.parametrize(("name", "proposer"), [("toy", object()), ("", NGramProposer())])
def test_objects_that_do_not_draft_and_empty_names_are_refused(name, proposer):
    with pytest.raises(InvalidArgument):
        ProposerService({name: proposer})


async def test_a_node_without_proposers_says_so(serve):
    stub = await serve(ProposerService())
    assert (await status_of(stub.ProposeBlock(ask())))[0] is grpc.StatusCode.NOT_FOUND


async def test_proposers_come_and_go_at_run_time(serve):
    service = ProposerService({"ngram": NGramProposer()})
    stub = await serve(service)
    service.serve("toy", ToyProposer(lambda p, n: [9] * n))
    assert service.served() == ("ngram", "toy")
    assert list((await stub.ProposeBlock(ask(size=1, model="toy"))).token_ids) == [9]
    service.serve("ngram", ToyProposer(lambda p, n: [8] * n))
    assert service.served() == ("ngram", "toy")
    assert list((await stub.ProposeBlock(ask(size=1))).token_ids) == [8]
    service.withdraw("toy")
    service.withdraw("never there")
    code, _ = await status_of(stub.ProposeBlock(ask(model="toy")))
    assert code is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    "request_",
    [
        ask([]),
        ask(size=0),
        ask(size=1025),
        ask(steps=0),
        ask(steps=1025),
        ask([], committed_token_ids_le32=b"123"),
        ask([], committed_token_ids_le32=bytes(4 * (MAX_PREFIX_TOKENS + 1))),
    ],
    ids=[
        "empty prefix",
        "no block",
        "large block",
        "no steps",
        "endless steps",
        "torn ids",
        "long prefix",
    ],
)
async def test_refuses_what_cannot_be_meant(serve, request_):
    stub = await serve(ProposerService({"ngram": NGramProposer()}))
    code, words = await status_of(stub.ProposeBlock(request_))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert words
    assert (await stub.ProposeBlock(ask())).num_valid == 4


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (ValueError("odd prefix"), grpc.StatusCode.INVALID_ARGUMENT),
        (InvalidArgument("odd prefix"), grpc.StatusCode.INVALID_ARGUMENT),
        (PeerUnavailable("engine restarts"), grpc.StatusCode.UNAVAILABLE),
        (RuntimeError("secret path"), grpc.StatusCode.INTERNAL),
    ],
)
async def test_a_proposer_that_raises_ends_its_call_and_nothing_else(serve, failure, code):
    def make(prefix, size):
        if prefix[0] == 666:
            raise failure
        return [5] * size

    stub = await serve(ProposerService({"toy": ToyProposer(make)}))
    seen, words = await status_of(stub.ProposeBlock(ask([666])))
    assert seen is code
    assert words
    assert "secret" not in words
    assert list((await stub.ProposeBlock(ask(size=1))).token_ids) == [5]


@pytest.mark.parametrize("tokens", [[-1], [2**32], ["x"]])
async def test_a_proposer_that_drafts_nonsense_ends_its_call_and_nothing_else(serve, tokens):
    stub = await serve(ProposerService({"toy": ToyProposer(lambda p, n: tokens)}))
    code, _ = await status_of(stub.ProposeBlock(ask()))
    assert code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT)


async def test_drafts_that_are_too_long_are_cut(serve):
    stub = await serve(ProposerService({"toy": ToyProposer(lambda p, n: [7] * 50)}))
    response = await stub.ProposeBlock(ask(size=3))
    assert list(response.token_ids) == [7, 7, 7]


async def test_a_blocking_proposer_does_not_block_the_event_loop(serve):
    gate = Gate()
    stub = await serve(ProposerService({"slow": gate.proposer(), "ngram": NGramProposer()}))
    slow = asyncio.ensure_future(stub.ProposeBlock(ask(model="slow")))
    await until(lambda: gate.now == 1)
    assert (await stub.ProposeBlock(ask(model="ngram"), timeout=60)).num_valid == 4
    gate.go.release()
    await slow


async def test_a_proposer_works_on_one_request_at_a_time(serve):
    gate = Gate()
    stub = await serve(ProposerService({"slow": gate.proposer()}))
    calls = [asyncio.ensure_future(stub.ProposeBlock(ask([at + 1]))) for at in range(6)]
    for _ in calls:
        gate.go.release()
    await asyncio.gather(*calls)
    assert gate.most_at_once == 1
    assert len(gate.asked) == 6


async def test_a_full_queue_refuses_at_once(serve):
    gate = Gate()
    stub = await serve(ProposerService({"slow": gate.proposer()}, queue_limit=2))
    first = asyncio.ensure_future(stub.ProposeBlock(ask([1])))
    await until(lambda: gate.now == 1)
    waiting = [asyncio.ensure_future(stub.ProposeBlock(ask([2]))) for _ in range(5)]
    done, pending = await asyncio.wait(waiting, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    await until(lambda: sum(call.done() for call in waiting) == 3)
    for call in waiting:
        if call.done():
            assert call.exception().code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for _ in range(3):
        gate.go.release()
    await first
    await asyncio.gather(*(call for call in waiting if not call.done()))
    assert done or pending


async def test_a_request_that_was_cancelled_while_waiting_is_never_computed(serve):
    gate = Gate()
    service = CountingService({"slow": gate.proposer()}, queue_limit=4)
    stub = await serve(service)
    first = asyncio.ensure_future(stub.ProposeBlock(ask([1])))
    await until(lambda: gate.now == 1)
    gone = asyncio.ensure_future(stub.ProposeBlock(ask([2])))
    await until(lambda: service.now == 2)
    expired = asyncio.ensure_future(stub.ProposeBlock(ask([3]), timeout=0.05))
    with pytest.raises(grpc.aio.AioRpcError):
        await expired
    gone.cancel()
    await until(lambda: service.now == 1)
    gate.go.release()
    await first
    gate.go.release()
    await stub.ProposeBlock(ask([4]))
    assert gate.asked == [[1], [4]]


async def test_after_a_caller_left_mid_draft_the_next_one_still_waits_for_the_thread(serve):
    gate = Gate()
    stub = await serve(ProposerService({"slow": gate.proposer()}))
    gone = asyncio.ensure_future(stub.ProposeBlock(ask([1])))
    await until(lambda: gate.now == 1)
    gone.cancel()
    following = asyncio.ensure_future(stub.ProposeBlock(ask([2])))
    await asyncio.sleep(0.05)
    assert gate.asked == [[1]]
    gate.go.release()
    gate.go.release()
    await following
    assert gate.most_at_once == 1


class FakeDrafter:
    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int, int | None, float, int]] = []

    async def draft(self, prefix, size, *, seed, temperature, num_steps, states):
        self.asked.append((list(prefix), size, seed, temperature, num_steps))
        return Draft(source="m", tokens=(4,) * size, confidence=(0.5,) * size, forward_passes=size)


async def test_an_async_drafter_gets_seed_temperature_and_steps(serve):
    drafter = FakeDrafter()
    assert isinstance(drafter, AsyncDrafter)
    assert not isinstance(drafter, Proposer)
    stub = await serve(ProposerService({"m": drafter}))
    response = await stub.ProposeBlock(ask([1], size=2, seed=5, temperature=0.5))
    assert list(response.token_ids) == [4, 4]
    assert response.forward_passes == 2
    await stub.ProposeBlock(ask([1], size=2, steps=3))
    assert drafter.asked == [([1], 2, 5, 0.5, 1), ([1], 2, None, 0.0, 3)]


async def test_a_long_prefix_goes_to_a_thread_and_gives_the_same_draft(serve):
    stub = await serve(ProposerService({"ngram": NGramProposer()}))
    prefix = [*range(5000), 1, 2, 3]
    response = await stub.ProposeBlock(ask(prefix, size=2))
    assert list(response.token_ids) == [4, 5]
    response = await stub.ProposeBlock(ask([*prefix, 4], size=2))
    assert list(response.token_ids) == [5, 6]


def test_a_stream_beyond_the_bound_is_told_when_one_is_expected_to_end() -> None:
    clock = ManualClock()
    service = DraftStreamService(
        ProposerService(clock=clock), clock=clock, limits=StreamLimits(streams=1)
    )
    for _ in range(3):
        with service._seat("mini-1"):
            clock.advance(7)
    with (
        service._seat("mini-1"),
        pytest.raises(QueueFull) as refused,
        service._seat("mini-2"),
    ):
        pass
    assert refused.value.retry_after_s == 7
