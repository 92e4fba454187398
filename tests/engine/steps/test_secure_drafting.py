"""An engine process drafts with a peer's ProposerService over mutual TLS, and only so."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from kakeya.backends.engines import engine_command
from kakeya.core.clock import SystemClock
from kakeya.core.units import pack_ids
from kakeya.decoding.draft.proposer import Draft
from kakeya.decoding.draft.states import HiddenStates
from kakeya.decoding.serve.service import ProposerService
from kakeya.decoding.serve.stream_service import DraftStreamService
from kakeya.engine.steps.drafting import Drafting, RemoteBooks
from kakeya.generation.request import DraftSource, Sampling
from kakeya.generation.spec import parse_model
from kakeya.v1 import engine_pb2 as pb
from kakeya.v1.distributed_pb2_grpc import add_ProposerServiceServicer_to_server
from kakeya.v1.drafts_pb2_grpc import add_DraftStreamServiceServicer_to_server
from kakeya.v1.engine_pb2_grpc import EngineServiceStub
from kakeya.wire.security import Caller, CertRole
from kakeya.wire.server.authorization import current_caller
from kakeya.wire.server.listeners import Listeners
from tests.engine.rig import EagerController, frames_of
from tests.mlx.random_models import write_model
from tests.wire.certificates import Fleet, write

PROMPT = [5, 9, 13, 2, 7] * 4
START_S = 60.0


class Recording:
    """Drafts one token over and over, and notes who asked."""

    def __init__(self) -> None:
        self.callers: list[Caller] = []

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
        self.callers.append(current_caller())
        return Draft(source="m", tokens=(5,) * size, forward_passes=size)


@asynccontextmanager
async def proposing(fleet: Fleet) -> AsyncIterator[tuple[Recording, str, str]]:
    """A ProposerService that only members reach; yields it, its address and its node id."""
    drafter = Recording()
    service = ProposerService({"m": drafter})
    node_id, material = fleet.issue()
    streams = DraftStreamService(service)

    def register(server: grpc.aio.Server) -> None:
        add_ProposerServiceServicer_to_server(service, server)
        add_DraftStreamServiceServicer_to_server(streams, server)

    listeners = Listeners(
        register,
        clock=SystemClock(),
        material=lambda: material,
        trust=fleet.trust,
    )
    address = await listeners.open_tls("127.0.0.1:0", flag="--bind")
    await listeners.start()
    try:
        yield drafter, address, node_id
    finally:
        await listeners.stop(None)


@pytest.fixture(scope="module")
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture(scope="module")
def engine(fleet: Fleet) -> Iterator[tuple[str, str]]:
    """An engine as a node starts it, with an identity; yields its address and its node id."""
    node_id, material = fleet.issue()
    with tempfile.TemporaryDirectory(prefix="kk") as folder:
        home = Path(folder)
        model = write_model(home / "model", "llama")
        identity = write(home / "identity", material)
        command = engine_command("text", identity)(parse_model(str(model)), str(model))
        child = subprocess.Popen(
            [sys.executable, *command(home / "s")[1:]],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        channel = grpc.insecure_channel(f"unix:{home}/s")
        grpc.channel_ready_future(channel).result(START_S)
        channel.close()
        yield f"unix:{home}/s", node_id
        child.terminate()
        assert child.wait(15) == 0
        assert child.stdin is not None
        child.stdin.close()


async def decode(engine: str, *sources: pb.DraftSource) -> tuple[list[int], pb.DecodeDone]:
    request = pb.DecodeRequest(
        token_ids_le32=pack_ids(PROMPT), max_tokens=24, draft_sources=sources
    )
    tokens: list[int] = []
    async with grpc.aio.insecure_channel(engine) as channel:
        async for message in EngineServiceStub(channel).Decode(request, timeout=60):
            for frame in frames_of(message):
                tokens += frame.tokens.token_ids
    return tokens, frame.done


def remote(address: str, server_name: str) -> pb.DraftSource:
    return pb.DraftSource(
        kind=pb.DraftSource.KIND_REMOTE,
        address=address,
        model_id="m",
        extended=True,
        server_name=server_name,
    )


async def test_a_peer_is_asked_as_the_node_that_the_engine_belongs_to(
    fleet: Fleet, engine: tuple[str, str]
) -> None:
    address, own_id = engine
    plain, _ = await decode(address)
    async with proposing(fleet) as (drafter, peer, node_id), asyncio.timeout(60):
        while not drafter.callers:  # a generation waits for no peer that is not connected yet
            drafted, done = await decode(address, remote(peer, node_id))
            assert drafted == plain
    assert {(caller.node_id, caller.role) for caller in drafter.callers} == {
        (own_id, CertRole.MEMBER)
    }
    assert done.sources[0].failed == 0


@pytest.mark.parametrize("claim", ["another name", "another fleet", "plain"])
async def test_whoever_cannot_show_the_expected_name_is_told_no_prompt(
    fleet: Fleet, engine: tuple[str, str], claim: str
) -> None:
    plain, _ = await decode(engine[0])
    host = Fleet() if claim == "another fleet" else fleet
    async with proposing(host) as (drafter, peer, node_id):
        name = {"another name": "a" * 52, "plain": ""}.get(claim, node_id)
        drafted, done = await decode(engine[0], remote(peer, name))
    assert drafted == plain
    assert drafter.callers == []
    assert done.accepted == 0


def sampled(books: RemoteBooks, spec: DraftSource) -> Drafting:
    return Drafting((spec,), EagerController(), books, vocab_size=100, sampling=Sampling())


def test_without_keys_a_peer_that_wants_them_costs_its_drafts_and_nothing_else() -> None:
    books = RemoteBooks()
    spec = DraftSource(kind="remote", address="127.0.0.1:1", model_id="m", server_name="x")
    threads = threading.active_count()
    drafting = sampled(books, spec)
    assert drafting.choose([1, 2, 3], 4)[1] == 0
    (tally,) = drafting.tallies()
    assert tally.failed == 1
    drafting.close()
    assert len(books) == 0
    assert threading.active_count() == threads


def test_renewed_keys_are_shown_by_the_next_generation(fleet: Fleet) -> None:
    shown = [fleet.issue()[1], fleet.issue()[1]]
    current = shown[0]
    books = RemoteBooks(lambda: current)
    spec = DraftSource(kind="remote", address="127.0.0.1:1", model_id="m", server_name="x")
    sampled(books, spec).close()
    first = books._shared[spec].proposer
    sampled(books, spec).close()
    assert books._shared[spec].proposer is first
    running = sampled(books, spec)
    current = shown[1]
    sampled(books, spec).close()
    assert books._shared[spec].proposer is first, "a sequence drafts with it"
    running.close()
    sampled(books, spec).close()
    assert books._shared[spec].proposer is not first
    books._shared[spec].proposer.close()
