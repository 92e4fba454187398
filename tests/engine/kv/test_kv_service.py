"""KV from pages and into them through a real engine child, with OpenBLAS where there is one."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import pytest

from kakeya.generation.engine_wire import facts_from_wire, job_to_wire
from kakeya.generation.facts import ModelFacts
from kakeya.generation.kv import NO_KV, KvOffer, KvPages
from kakeya.generation.request import DecodeRequest
from kakeya.memory.pages.reader import PageReader
from kakeya.v1 import engine_pb2 as pb
from kakeya.v1.engine_pb2_grpc import EngineServiceStub
from tests.engine.kv.test_blocks import text
from tests.engine.kv_rig import Prefixes
from tests.engine.rig import frames_of
from tests.engine.test_service import START_S, spawn
from tests.mlx.random_models import write_model

if TYPE_CHECKING:
    from kakeya.v1.engine_pb2_grpc import EngineServiceAsyncStub

ANSWER = 6


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="kk") as folder:
        child = spawn(Path(folder) / "s", str(write_model(Path(folder) / "model", "gemma3")))
        with grpc.insecure_channel(f"unix:{folder}/s") as channel:
            grpc.channel_ready_future(channel).result(START_S)
        yield f"unix:{folder}/s"
        child.terminate()
        assert child.wait(15) == 0
        assert child.stdin is not None
        child.stdin.close()
        assert child.stderr is not None
        child.stderr.close()


@pytest.fixture
async def stub(address: str) -> AsyncIterator[EngineServiceAsyncStub]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield EngineServiceStub(channel)


@pytest.fixture
async def facts(stub: EngineServiceAsyncStub) -> ModelFacts:
    return facts_from_wire(await stub.Describe(pb.DescribeRequest(), timeout=5))


@pytest.fixture
def prefixes(tmp_path: Path) -> Iterator[Prefixes]:
    with Prefixes(tmp_path) as made:
        yield made


@dataclass
class Answer:
    frames: list[pb.DecodeResponse]

    @property
    def tokens(self) -> list[int]:
        return [token for frame in self.frames for token in frame.tokens.token_ids]

    @property
    def exported(self) -> list[int]:
        return [index for index, _ in self.filled]

    @property
    def filled(self) -> list[tuple[int, int]]:
        told = [frame.exported for frame in self.frames if frame.HasField("exported")]
        return [(one.index, one.tokens) for one in told]


async def decode(stub: EngineServiceAsyncStub, request: pb.DecodeRequest) -> Answer:
    messages = [message async for message in stub.Decode(request, timeout=30)]
    return Answer([frame for message in messages for frame in frames_of(message)])


async def ask(
    stub: EngineServiceAsyncStub,
    prefixes: Prefixes,
    facts: ModelFacts,
    history: list[int],
    *,
    most: int = 1 << 30,
    max_tokens: int = ANSWER,
    cuts: tuple[int, ...] = (),
) -> Answer:
    """As the agent does: offer, decode, commit."""
    offer = prefixes.offer(history, facts, most=most, cuts=cuts)  # type: ignore[arg-type]
    request = job_to_wire(
        DecodeRequest(token_ids=history, max_tokens=max_tokens, cuts=cuts),
        KvOffer(blocks=offer.kv_blocks, exports=offer.kv_exports),
    )
    answer = await decode(stub, request)
    prefixes.commit(offer, answer.filled)
    return answer


def contents(pages: KvPages) -> bytes:
    with PageReader() as reader:
        return reader.read(pages.pages)


async def test_an_engine_continues_from_pages_as_if_it_had_computed_them(
    stub: EngineServiceAsyncStub, facts: ModelFacts, prefixes: Prefixes
) -> None:
    history = text(300)
    request = job_to_wire(DecodeRequest(token_ids=history, max_tokens=ANSWER), NO_KV)
    plain = (await decode(stub, request)).tokens
    cold = await ask(stub, prefixes, facts, history)
    assert facts.kv_block_tokens == 64
    assert cold.exported == [0, 1, 2, 3, 4]
    assert cold.tokens == plain
    first = {key: contents(pages) for key, pages in prefixes.blocks.items()}
    for most, imported in ((5, 299), (4, 256), (1, 64)):
        warm = await ask(stub, prefixes, facts, history, most=most)
        assert warm.frames[0].imported.tokens == imported
        assert warm.frames[-1].done.cached_tokens == imported
        assert warm.tokens == plain
        # What it computed behind what it took has the bits of the first time.
        assert {key: contents(pages) for key, pages in prefixes.blocks.items()} == first


async def test_prefill_alone_fills_pages_and_answers_nothing(
    stub: EngineServiceAsyncStub, facts: ModelFacts, prefixes: Prefixes
) -> None:
    history = text(200, seed=3)
    alone = await ask(stub, prefixes, facts, history, max_tokens=0)
    assert alone.tokens == []
    assert alone.exported == [0, 1, 2, 3]
    assert alone.frames[-1].done.reason == pb.DecodeDone.REASON_MAX_TOKENS
    warm = await ask(stub, prefixes, facts, history)
    assert warm.frames[0].imported.tokens == 199
    assert len(warm.tokens) == ANSWER


async def test_pages_that_went_only_cost_time(
    stub: EngineServiceAsyncStub, facts: ModelFacts, prefixes: Prefixes
) -> None:
    history = text(150, seed=4)
    cold = await ask(stub, prefixes, facts, history)
    offer = prefixes.offer(history, facts)  # type: ignore[arg-type]
    for pages in offer.kv_blocks:
        prefixes.arena.pool.free(prefixes.arena._find(pages.pages))
    request = job_to_wire(
        DecodeRequest(token_ids=history, max_tokens=ANSWER), KvOffer(blocks=offer.kv_blocks)
    )
    lost = await decode(stub, request)
    assert lost.frames[0].WhichOneof("frame") == "imported"
    assert lost.frames[0].imported.tokens == 0
    assert lost.tokens == cold.tokens


async def test_a_slab_that_was_taken_away_is_not_held_by_the_engine(
    stub: EngineServiceAsyncStub, facts: ModelFacts, prefixes: Prefixes
) -> None:
    history = text(150, seed=5)
    await ask(stub, prefixes, facts, history)
    await ask(stub, prefixes, facts, history)
    slabs = {pages.pages.slab for pages in prefixes.blocks.values()}
    for status in Path("/proc").glob("[0-9]*/maps"):
        try:
            mapped = status.read_text()
        except OSError:
            continue  # it ended, or is somebody else's
        owner = status.parent.name == str(Path("/proc/self").resolve().name)
        assert owner or not any(slab in mapped for slab in slabs)


async def test_an_engine_says_where_its_pieces_end_and_cuts_them_where_it_is_told(
    stub: EngineServiceAsyncStub, facts: ModelFacts, prefixes: Prefixes
) -> None:
    reply = await stub.Describe(pb.DescribeRequest())
    assert facts.prefill_grid == tuple((one.position, one.tokens) for one in reply.prefill_grid)
    shared, cut = text(100), 100
    first = await ask(stub, prefixes, facts, [*shared, *text(30, seed=5)], cuts=(cut,))
    place = divmod(cut, facts.kv_block_tokens)
    assert place in first.filled
    follower = [*shared, *text(30, seed=6)]
    warm = await ask(stub, prefixes, facts, follower, cuts=(cut,))
    assert warm.frames[0].imported.tokens >= cut or warm.frames[-1].done.cached_tokens >= cut
    alone = await ask(stub, prefixes, facts, follower, most=0, cuts=(cut,))
    assert alone.tokens == warm.tokens
