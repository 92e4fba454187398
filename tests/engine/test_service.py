"""The engine child as the agent meets it: a real process, a real unix socket, a real model."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import pytest

from kakeya.core.units import pack_ids
from kakeya.engine.service import MAX_DRAFTED
from kakeya.v1 import engine_pb2 as pb
from kakeya.v1.engine_pb2_grpc import EngineServiceStub
from tests import findings
from tests.engine.rig import frames_of
from tests.mlx.random_models import EOS, VOCAB, write_model

if TYPE_CHECKING:
    from kakeya.v1.engine_pb2_grpc import EngineServiceAsyncStub

START_S = 60.0
PROMPT = [5, 9, 13, 2, 7] * 4


def spawn(socket: Path, model: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "kakeya.node.engine_main",
            "--socket",
            str(socket),
            "--model",
            model,
            "--model-id",
            "toy",
            *findings.flags(),
        ],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    with tempfile.TemporaryDirectory(prefix="kk") as folder:
        changes = {"max_position_embeddings": 4096}
        model = write_model(Path(folder) / "model", "llama", changes=changes)
        child = spawn(Path(folder) / "s", str(model))
        address = f"unix:{folder}/s"
        channel = grpc.insecure_channel(address)
        grpc.channel_ready_future(channel).result(START_S)
        channel.close()
        yield child, address
        child.terminate()
        assert child.wait(60) == 0
        assert child.stdin is not None
        child.stdin.close()
        assert child.stderr is not None
        child.stderr.close()


@pytest.fixture
async def stub(
    engine: tuple[subprocess.Popen[bytes], str],
) -> AsyncIterator[EngineServiceAsyncStub]:
    async with grpc.aio.insecure_channel(engine[1]) as channel:
        yield EngineServiceStub(channel)


def request(**changes: object) -> pb.DecodeRequest:
    values: dict[str, object] = {"token_ids_le32": pack_ids(PROMPT), "max_tokens": 24}
    return pb.DecodeRequest(**{**values, **changes})  # type: ignore[arg-type]


async def decode(
    stub: EngineServiceAsyncStub, wanted: pb.DecodeRequest
) -> tuple[list[int], pb.DecodeDone]:
    frames = [
        frame async for message in stub.Decode(wanted, timeout=60) for frame in frames_of(message)
    ]
    assert [frame.WhichOneof("frame") for frame in frames].count("done") == 1
    tokens = [t for frame in frames for t in frame.tokens.token_ids]
    return tokens, frames[-1].done


async def test_it_describes_its_model(stub: EngineServiceAsyncStub) -> None:
    facts = await stub.Describe(pb.DescribeRequest(), timeout=60)
    assert facts.model_id == "toy"
    assert facts.vocab_size == VOCAB
    assert list(facts.eos_token_ids) == [EOS]
    assert facts.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4


async def test_drafts_change_nothing_over_the_socket(stub: EngineServiceAsyncStub) -> None:
    plain, _ = await decode(stub, request())
    source = pb.DraftSource(kind=pb.DraftSource.KIND_NGRAM)
    drafted, done = await decode(stub, request(draft_sources=[source]))
    assert drafted == plain
    assert len(plain) == 24
    assert done.reason == pb.DecodeDone.REASON_MAX_TOKENS
    assert [tally.source for tally in done.sources] == ["ngram"]


async def test_the_same_seed_samples_the_same_tokens(stub: EngineServiceAsyncStub) -> None:
    sampled = request(temperature=1.0, top_p=0.9, top_k=50, seed=(1 << 64) - 1)
    first, _ = await decode(stub, sampled)
    again, _ = await decode(stub, sampled)
    other, _ = await decode(stub, request(temperature=1.0, seed=1))
    assert first == again != other


async def test_concurrent_calls_get_what_each_gets_alone(stub: EngineServiceAsyncStub) -> None:
    prompts = [PROMPT[:n] for n in (3, 7, 12)]
    wanted = [request(token_ids_le32=pack_ids(p)) for p in prompts]
    alone = [(await decode(stub, w))[0] for w in wanted]
    together = await asyncio.gather(*(decode(stub, w) for w in wanted))
    assert [tokens for tokens, _ in together] == alone


async def test_kv_is_kept_counted_and_released(stub: EngineServiceAsyncStub) -> None:
    tokens, _ = await decode(stub, request(kv_key="s1"))
    stats = await stub.Stats(pb.StatsRequest(), timeout=60)
    assert stats.kv_bytes_by_key["s1"] == stats.kv_live_bytes > 0
    assert stats.cache_length_violations == stats.position_violations == 0
    longer = request(token_ids_le32=pack_ids(PROMPT + tokens), kv_key="s1")
    _, done = await decode(stub, longer)
    assert done.cached_tokens >= len(PROMPT) + len(tokens) - 1
    released = await stub.Release(pb.ReleaseRequest(kv_key="s1"), timeout=60)
    assert released.released_bytes > 0
    assert (await stub.Stats(pb.StatsRequest(), timeout=60)).kv_live_bytes == 0


async def test_it_drafts_for_others(stub: EngineServiceAsyncStub) -> None:
    own, _ = await decode(stub, request(max_tokens=5))
    answer = await stub.Draft(pb.DraftRequest(token_ids_le32=pack_ids(PROMPT), size=5), timeout=60)
    assert list(answer.token_ids) == own
    assert len(answer.confidence) == 5


async def test_a_long_draft_for_others_is_cut_so_that_generations_go_on(
    stub: EngineServiceAsyncStub,
) -> None:
    asked = pb.DraftRequest(token_ids_le32=pack_ids(PROMPT), size=1024)
    assert len((await stub.Draft(asked, timeout=60)).token_ids) == MAX_DRAFTED


async def test_a_draft_ends_at_the_context(stub: EngineServiceAsyncStub) -> None:
    context = (await stub.Describe(pb.DescribeRequest(), timeout=60)).context_tokens
    for room in (3, 0, -400):
        prefix = pack_ids([7] * (context - room))
        answer = await stub.Draft(pb.DraftRequest(token_ids_le32=prefix, size=8), timeout=60)
        assert len(answer.token_ids) == max(0, room)


@pytest.mark.parametrize("bad", [VOCAB, 999_999, 2**31 - 1, 2**32 - 1])
async def test_a_foreign_id_in_a_prefix_is_refused_and_the_engine_lives(
    stub: EngineServiceAsyncStub, bad: int
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Draft(pb.DraftRequest(token_ids_le32=pack_ids([1, bad]), size=4), timeout=60)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "outside the vocabulary" in str(caught.value.details())
    await stub.Draft(pb.DraftRequest(token_ids_le32=pack_ids(PROMPT), size=4), timeout=60)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"token_ids_le32": b""}, "empty"),
        ({"token_ids_le32": b"123"}, "no multiple of 4"),
        ({"token_ids_le32": pack_ids([VOCAB])}, "outside the vocabulary"),
    ],
)
async def test_bad_requests_are_invalid_arguments(
    stub: EngineServiceAsyncStub, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await decode(stub, request(**changes))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert said in str(caught.value.details())


async def test_a_cancelled_call_stops_the_work(stub: EngineServiceAsyncStub) -> None:
    call = stub.Decode(request(max_tokens=4000, kv_key="left"))
    await call.read()
    call.cancel()
    async with asyncio.timeout(60):
        while (stats := await stub.Stats(pb.StatsRequest(), timeout=60)).running:
            await asyncio.sleep(0.005)
    whole = (len(PROMPT) + 4000) * (await stub.Describe(pb.DescribeRequest())).kv_bytes_per_token
    assert 0 < stats.kv_bytes_by_key["left"] < whole, "it went on to the end"
    await stub.Release(pb.ReleaseRequest(kv_key="left"), timeout=60)


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "llama")
    with tempfile.TemporaryDirectory(prefix="kk") as folder:
        child = spawn(Path(folder) / "s", str(model))
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(20) == 0
        assert child.stderr is not None
        child.stderr.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_cleanly_on_signals(tmp_path: Path, number: signal.Signals) -> None:
    model = write_model(tmp_path / "model", "llama")
    with tempfile.TemporaryDirectory(prefix="kk") as folder:
        child = spawn(Path(folder) / "s", str(model))
        channel = grpc.insecure_channel(f"unix:{folder}/s")
        grpc.channel_ready_future(channel).result(START_S)
        channel.close()
        os.kill(child.pid, number)
        assert child.wait(60) == 0
        child.communicate(timeout=60)


def test_a_missing_model_is_said_in_one_line_with_status_2(tmp_path: Path) -> None:
    child = spawn(tmp_path / "s", str(tmp_path / "nowhere"))
    assert child.wait(START_S) == 2
    last = child.communicate(timeout=60)[1].decode().strip().splitlines()[-1]
    assert "nowhere" in last
    assert "does not exist" in last


def spawn_toy(mode: str, folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.engine.child_engine", mode),
            *("--socket", f"{folder}/s", "--model", f"{folder}/once", "--model-id", "toy"),
        ],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


async def test_stopped_in_the_middle_of_a_step_it_ends_clean() -> None:
    """The model thread ends its step when all calls are gone, with a frame for the loop in hand."""
    with tempfile.TemporaryDirectory(prefix="kk") as folder:
        child = spawn_toy("slow", Path(folder))
        async with grpc.aio.insecure_channel(f"unix:{folder}/s") as channel:
            await asyncio.wait_for(channel.channel_ready(), START_S)
            call = EngineServiceStub(channel).Decode(request(token_ids_le32=pack_ids([7] * 1000)))
            await call.read()  # the first chunk is done, the second one has begun
            call.cancel()
            child.terminate()
            await asyncio.to_thread(child.wait, 15)  # before its input ends, which kills it
            _, errors = await asyncio.to_thread(child.communicate)
    assert "Traceback" not in errors.decode()
    assert child.returncode == 0


async def test_without_its_model_thread_an_engine_ends_at_once_with_1_and_says_why() -> None:
    with tempfile.TemporaryDirectory(prefix="kk") as folder:
        child = spawn_toy("breaks", Path(folder))
        async with grpc.aio.insecure_channel(f"unix:{folder}/s") as channel:
            await asyncio.wait_for(channel.channel_ready(), START_S)
            call = EngineServiceStub(channel).Decode(
                request(token_ids_le32=pack_ids([7]), max_tokens=4000)
            )
            with pytest.raises(grpc.aio.AioRpcError) as lost:
                async for _ in call:
                    pass
            assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
            await asyncio.to_thread(child.wait, 15)
            _, errors = await asyncio.to_thread(child.communicate)
    assert child.returncode == 1
    assert errors.decode().strip().splitlines()[-1] == (
        "kakeya engine: DeviceLost('the device is gone')"
    )


async def test_an_engine_says_how_long_its_model_thread_has_been_at_one_step() -> None:
    with tempfile.TemporaryDirectory(prefix="kk") as folder:
        child = spawn_toy("hangs", Path(folder))
        async with grpc.aio.insecure_channel(f"unix:{folder}/s") as channel:
            await asyncio.wait_for(channel.channel_ready(), START_S)
            stub = EngineServiceStub(channel)
            idle = await stub.Describe(pb.DescribeRequest())
            assert idle.model_thread_silent_seconds == 0
            call = stub.Decode(request(token_ids_le32=pack_ids([7]), max_tokens=40))
            silent_s = [0.0]
            async with asyncio.timeout(START_S):
                while silent_s[-1] < 1.0:
                    described = await stub.Describe(pb.DescribeRequest())
                    silent_s.append(described.model_thread_silent_seconds)
                    await asyncio.sleep(0.05)
            call.cancel()
            child.kill()
            await asyncio.to_thread(child.communicate)
