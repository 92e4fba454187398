"""RuntimeService and its client over a real port: frames, status codes, cancellation, laws."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from itertools import pairwise

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kakeya.core.errors import (
    CapacityExhausted,
    Conflict,
    DrainTimeout,
    InvalidArgument,
    InvariantBroken,
    LoadFailed,
    MemoryRefused,
    NotFound,
    PeerUnavailable,
    Refused,
)
from kakeya.generation.facts import ModelState
from kakeya.generation.frames import Tokens
from kakeya.generation.request import Sampling
from kakeya.sessions.client import Client, GenerateEnd
from kakeya.v1 import runtime_pb2 as pb
from kakeya.v1.runtime_pb2_grpc import RuntimeServiceStub
from tests.fakes import FakeClock
from tests.sessions.conftest import running_node
from tests.sessions.toy import HashServedModel, expected
from tests.waiting import until

PROMPT = [5, 6, 7]


async def generate(session, max_tokens, **options):
    return [token async for token in session.generate(max_tokens, **options)]


async def frames_of(node, session_id, **fields):
    request = pb.GenerateRequest(session_id=session_id, **fields)
    return [frame async for frame in node.stub.Generate(request)]


async def status_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    return failure.value.code(), failure.value.details()


async def test_a_client_that_cools_down_is_refused_with_a_status_and_a_time(node):
    session = await node.client.create_session(label="test")
    await session.append(PROMPT)
    with node.service._clients.request("127.0.0.1", cooldown_s=30) as use:
        use.begin()
    with pytest.raises(Refused, match="asked for a cooldown") as refused:
        await generate(session, 2)
    assert 0 < refused.value.retry_after_s <= 30


async def test_a_generation_is_token_ids_in_order_then_one_done(node):
    session = await node.client.create_session(label="test")
    assert await session.append(PROMPT) == 3
    frames = await frames_of(node, session.session_id, max_tokens=5)
    kinds = [frame.WhichOneof("payload") for frame in frames]
    assert kinds == ["token_id"] * 5 + ["done"]
    assert [frame.token_id for frame in frames[:-1]] == expected(PROMPT, 5)[0]
    done = frames[-1].done
    assert done.stop_reason == pb.GenerateDone.STOP_REASON_MAX_TOKENS
    assert (done.generated_token_count, done.forward_count) == (5, 5)
    assert (done.prefill_duration_seconds, done.total_duration_seconds) == (0.01, 0.02)
    counts = (done.drafted_token_count, done.verified_token_count, done.accepted_token_count)
    assert counts == (3, 2, 1)
    assert node.model.requests[0].kv_key == session.session_id


async def test_a_second_generation_continues_the_history_and_its_kv(node):
    async with await node.client.create_session() as session:
        await session.append(PROMPT)
        first = await generate(session, 4)
        second = await generate(session, 4)
        assert first + second == expected(PROMPT, 8)[0]
        assert session.last_done.cached_tokens == len(PROMPT) + 4 - 1
        info = await session.info()
        assert (info.history_length, info.cache_length_violations) == (11, 0)
        assert info.kv_live_bytes == 8 * 10, "INV-1: the cache holds all but the last token"


async def test_an_eos_token_is_sent_last_and_only_when_the_session_names_it(node):
    ids, _ = expected(PROMPT, 30)
    eos = ids[6]
    stops_at = ids.index(eos) + 1
    session = await node.client.create_session(eos_token_ids=[eos, 4_000_000_000])
    await session.append(PROMPT)
    assert await generate(session, 30) == ids[:stops_at]
    assert session.last_done.end is GenerateEnd.EOS
    free = await node.client.create_session()
    await free.append(PROMPT)
    assert await generate(free, 30) == ids


async def test_a_bad_id_is_named_with_its_index_and_changes_nothing(node):
    session = await node.client.create_session()
    await session.append(PROMPT)
    request = pb.AppendTokensRequest(session_id=session.session_id, token_ids=[1, 97])
    code, details = await status_of(node.stub.AppendTokens(request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details == (
        "token_ids[1] is 97, outside the vocabulary of 97 ids (0..96); nothing was appended"
    )
    assert (await session.info()).history_length == 3


async def test_a_prompt_of_more_than_128_ki_ids_is_refused_and_changes_nothing(node):
    session = await node.client.create_session()
    with pytest.raises(InvalidArgument, match="one call may append 131072"):
        await session.append([1] * (128 * 1024 + 1))
    assert (await session.info()).history_length == 0
    assert await session.append([1] * 128 * 1024) == 128 * 1024


async def test_what_no_message_holds_is_refused_by_name_and_the_session_can_be_used_on(node):
    session = await node.client.create_session()
    with pytest.raises(InvalidArgument, match=r"token_ids\[1\] is -5, it must be a whole number"):
        await session.append([1, -5])
    await session.append(PROMPT)
    with pytest.raises(InvalidArgument, match="max_tokens is 4294967296, it must be a whole"):
        await generate(session, 2**32)
    with pytest.raises(InvalidArgument, match="conversation_id is 'Zoë', it must be of printable"):
        await generate(session, 5, conversation_id="Zoë")
    assert len(await generate(session, 5)) == 5


async def test_client_errors_are_invalid_argument_before_anything_runs(node):
    session = await node.client.create_session()
    with pytest.raises(InvalidArgument, match="append a prompt first"):
        await generate(session, 5)
    await session.append(PROMPT)
    with pytest.raises(InvalidArgument, match="max_tokens is 0, it must be in 1"):
        await generate(session, 0)
    with pytest.raises(InvalidArgument, match="temperature is -1"):
        await generate(session, 5, temperature=-1.0)
    assert node.model.requests == []
    assert await generate(session, 3) == expected(PROMPT, 3)[0]


async def test_the_draft_policy_reaches_the_router_and_its_sources_the_model(node):
    session = await node.client.create_session()
    await session.append(PROMPT)
    await generate(session, 1, draft_policy="off")
    await generate(session, 1)
    assert node.router.policies == ["off", ""]
    assert [len(asked.draft_sources) for asked in node.model.requests] == [0, 1]


async def test_a_pinned_seed_repeats_and_an_unset_one_varies(node):
    async def sample(**options):
        session = await node.client.create_session()
        await session.append(PROMPT)
        return await generate(session, 12, temperature=1.0, **options)

    wanted = expected(PROMPT, 12, sampling=Sampling(temperature=1.0, seed=0))[0]
    assert await sample(seed=0) == wanted
    assert await sample() != await sample()


async def test_unknown_and_closed_ids_are_not_found_and_a_second_close_too(node):
    session = await node.client.create_session()
    await session.append(PROMPT)
    assert await session.close() == 3
    assert node.model.released == [session.session_id]
    for call in (session.close(), session.info(), session.append([1]), generate(session, 1)):
        with pytest.raises(NotFound, match="was never created here, was closed or expired"):
            await call


async def test_an_unknown_model_is_not_found_and_the_served_ones_are_named(node):
    with pytest.raises(NotFound, match="served are: toy"):
        await node.client.create_session(model_id="gpt-9")


async def test_a_full_node_answers_resource_exhausted():
    async with running_node(capacity=1) as node:
        await node.client.create_session()
        code, details = await status_of(node.stub.CreateSession(pb.CreateSessionRequest()))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "all 1 sessions of this node are in use" in details


async def test_a_draining_node_takes_no_new_sessions_but_serves_the_old_ones(node):
    session = await node.client.create_session()
    await session.append(PROMPT)
    node.service.drain("it is shutting down")
    with pytest.raises(Refused, match="no new sessions: it is shutting down"):
        await node.client.create_session()
    assert await generate(session, 2) == expected(PROMPT, 2)[0]


async def test_a_model_that_is_not_up_is_unavailable_with_retry_after():
    async with running_node(HashServedModel(state=ModelState.RESTARTING)) as node:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await node.stub.CreateSession(pb.CreateSessionRequest())
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
        trailing = dict(failure.value.trailing_metadata())
        assert (trailing["kakeya-error"], trailing["retry-after"]) == ("unavailable", "1")


async def test_a_client_gets_the_error_that_the_node_named_with_its_wait():
    async with running_node(HashServedModel(state=ModelState.RESTARTING)) as node:
        with pytest.raises(PeerUnavailable) as unavailable:
            await node.client.create_session()
        assert unavailable.value.retry_after_s == 1.0
    async with running_node(capacity=1) as node:
        await node.client.create_session()
        with pytest.raises(CapacityExhausted):
            await node.client.create_session()


async def test_a_cut_says_what_it_costs_and_why(caplog):
    """A configured window cuts each turn once it is full: nothing behind the sink keeps its KV."""
    caplog.set_level("INFO")
    async with running_node(sink_tokens=2, window_tokens=6) as node:
        session = await node.client.create_session()
        for turn in range(3):
            await session.append([1 + turn] * 7)
            assert await generate(session, 2)
    cuts = [vars(record) for record in caplog.records if record.message == "history cut"]
    assert len(cuts) == 2, "the first turn still fits"
    for cut in cuts:
        said = str(cut)
        assert "'kept': 8, 'kv_kept': 2" in said
        assert "moves every token behind the sink" in said


async def test_a_second_operation_is_aborted_while_one_runs():
    model = HashServedModel(gate=asyncio.Event())
    async with running_node(model) as node:
        session = await node.client.create_session()
        await session.append(PROMPT)
        first = asyncio.create_task(generate(session, 2))
        await until(lambda: node.service.stats.generates_running == 1)
        for call in (session.append([1]), session.close(), generate(session, 1)):
            with pytest.raises(Conflict, match="busy with Generate"):
                await call
        assert (await session.info()).idle_s == 0.0
        model.gate.set()
        await until(lambda: not model.gate.is_set())
        model.gate.set()
        assert await first == expected(PROMPT, 2)[0]


async def test_a_client_that_leaves_stops_the_engine_and_keeps_its_session():
    """Row 26: the original deletes the session here."""
    model = HashServedModel(gate=asyncio.Event())
    async with running_node(model) as node:
        session = await node.client.create_session()
        await session.append(PROMPT)
        seen = []
        async with aclosing(session.generate(100)) as tokens:
            model.gate.set()
            async for token in tokens:
                seen.append(token)
                if len(seen) == 3:
                    break
                model.gate.set()
        await until(lambda: model.closed_early == 1)
        assert model.steps <= 4
        assert node.service.stats.generates_cancelled == 1
        length = (await session.info()).history_length
        assert 6 <= length <= 7
        model.gate = None
        ids = expected(PROMPT, 20)[0]
        assert seen == ids[:3]
        assert await generate(session, 5) == ids[length - 3 : length + 2]


async def test_a_session_can_be_used_at_once_after_a_cancelled_generation(node):
    session = await node.client.create_session()
    await session.append(PROMPT)
    for _ in range(30):
        async with aclosing(session.generate(500)) as tokens:
            async for _ in tokens:
                break
        await session.append([1])


async def test_a_client_deadline_stops_the_engine_too():
    model = HashServedModel(gate=asyncio.Event())
    async with running_node(model) as node:
        deadline_s = 0.1
        while not model.requests:
            deadline_s *= 2
            session = await node.client.create_session()
            await session.append(PROMPT)
            request = pb.GenerateRequest(session_id=session.session_id, max_tokens=9)
            code, _ = await status_of(node.stub.Generate(request, timeout=deadline_s).read())
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: model.closed_early == len(model.requests))
        await until(lambda: not any(one.is_busy for one in node.store.sessions()))


async def test_an_engine_that_is_lost_costs_the_call_and_not_the_session(node):
    """Row 29: the tokens so far are the client's, the error is typed, the session goes on."""
    node.model.fail_after = 4
    session = await node.client.create_session()
    await session.append(PROMPT)
    seen = []

    async def consume():
        async for token in session.generate(9):
            seen.append(token)

    with pytest.raises(PeerUnavailable, match="the toy engine is gone"):
        await consume()
    node.model.fail_after = None
    assert seen == expected(PROMPT, 4)[0]
    assert seen + await generate(session, 5) == expected(PROMPT, 9)[0]
    assert node.service.stats.generates_failed == 1


@pytest.mark.parametrize(
    "refusal",
    [
        DrainTimeout("big is in use for over 10 s", retry_after_s=10),
        MemoryRefused("small is larger than the budget"),
        LoadFailed("a broken file", retry_after_s=30),
    ],
)
async def test_a_model_without_room_ends_the_call_with_its_error_and_the_session_goes_on(refusal):
    class Crowded(HashServedModel):
        is_crowded = True

        async def decode(self, request):
            self.requests.append(request)
            if self.is_crowded:
                raise refusal
            async for frame in super().decode(request):
                yield frame

    model = Crowded()
    async with running_node(model) as node:
        session = await node.client.create_session()
        await session.append(PROMPT)
        with pytest.raises(type(refusal), match=refusal.message) as refused:
            await generate(session, 3)
        assert refused.value.retry_after_s == refusal.retry_after_s
        model.is_crowded = False
        assert await generate(session, 3) == expected(PROMPT, 3)[0]


async def test_a_call_tells_the_model_how_long_its_caller_waits(node):
    created = await node.stub.CreateSession(pb.CreateSessionRequest())
    await node.stub.AppendTokens(
        pb.AppendTokensRequest(session_id=created.session_id, token_ids=PROMPT)
    )
    request = pb.GenerateRequest(session_id=created.session_id, max_tokens=1)
    _ = [frame async for frame in node.stub.Generate(request, timeout=60)]
    _ = [frame async for frame in node.stub.Generate(request)]
    told = [asked.deadline_s for asked in node.model.requests]
    assert 30 < told[0] < 61  # as gRPC rounds it
    assert told[1] is None


async def test_a_long_history_is_cut_once_before_the_first_token():
    async with running_node(sink_tokens=2, window_tokens=6) as node:
        session = await node.client.create_session()
        prompt = list(range(20))
        await session.append(prompt)
        frames = await frames_of(node, session.session_id, max_tokens=3)
        assert [f.WhichOneof("payload") for f in frames] == [
            "truncated",
            *["token_id"] * 3,
            "done",
        ]
        assert frames[0].truncated.dropped_token_count == 12
        kept = [0, 1, *range(14, 20)]
        assert [f.token_id for f in frames[1:-1]] == expected(kept, 3)[0]
        assert (await session.info()).history_length == 8 + 3
        again = [token async for token in session.generate(1)]
        assert session.last_done.dropped_tokens == 3
        assert len(again) == 1


async def test_a_context_that_fills_ends_with_truncated_and_leaves_the_session_usable():
    async with running_node(HashServedModel(context=16)) as node:
        session = await node.client.create_session()
        await session.append(PROMPT)
        tokens = await generate(session, 100)
        assert len(tokens) == 13
        assert session.last_done.end is GenerateEnd.TRUNCATED
        assert (await session.info()).history_length == 16
        assert await generate(session, 2)
        assert session.last_done.dropped_tokens == 16 - 10


async def test_a_session_at_the_edge_of_the_context_keeps_its_kv_for_many_turns():
    context = 100
    async with running_node(HashServedModel(context=context), sink_tokens=4) as node:
        session = await node.client.create_session()
        length, cuts, reused = 0, 0, []
        for _ in range(40):
            length = await session.append(PROMPT)
            assert len(await generate(session, 2)) == 2
            done = session.last_done
            if done.dropped_tokens:
                assert done.dropped_tokens == length - (4 + 48)
                cuts += 1
            else:
                reused.append(done.cached_tokens / length)
            length += 2 - done.dropped_tokens
            assert (await session.info()).history_length == length <= context
    assert 1 <= cuts <= 5
    assert min(reused[3:]) > 0.5


async def test_a_broken_law_fails_the_session_with_failed_precondition():
    class Broken(HashServedModel):
        async def decode(self, request):
            async for frame in super().decode(request):
                yield frame
                if self.steps == 2:
                    raise InvariantBroken("cache_length", "5 tokens in KV, 4 expected")

    async with running_node(Broken()) as node:
        session = await node.client.create_session()
        await session.append(PROMPT)
        code, details = await status_of(frames_of(node, session.session_id, max_tokens=5))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert details == "cache_length: 5 tokens in KV, 4 expected"
        assert node.model.released == [session.session_id]
        # The client hears of a broken law, not of a peer that speaks nonsense.
        with pytest.raises(InvariantBroken, match="begin a new session") as broken:
            await session.append([1])
        assert broken.value.kind == f"{node.address}: session_failed"
        info = await session.info()
        assert (info.cache_length_violations, info.position_violations) == (1, 0)
        assert node.service.stats.sessions.failed == 1
        await session.close()


async def test_idle_sessions_are_swept_and_their_kv_released():
    clock = FakeClock()
    async with running_node(clock=clock, idle_ttl_s=60.0, sweep_interval_s=15.0) as node:
        session = await node.client.create_session()
        await until(lambda: node.service.stats.sessions.expired == 1)
        assert node.model.released == [session.session_id]
        with pytest.raises(NotFound):
            await session.info()
        assert all(health.running for health in node.service.health())


async def test_a_slow_reader_stalls_its_engine_instead_of_filling_memory():
    """Row 27: what is under way is bounded by the flow control window of the reader."""
    model = Endless()
    fixed_window = (("grpc.http2.bdp_probe", 0),)
    async with (
        running_node(model) as node,
        grpc.aio.insecure_channel(node.address, options=fixed_window) as channel,
    ):
        session = await node.client.create_session()
        await session.append(PROMPT)
        call = RuntimeServiceStub(channel).Generate(
            pb.GenerateRequest(session_id=session.session_id, max_tokens=10**6)
        )
        await call.read()
        await model.stalls()
        assert model.sent < 20_000
        call.cancel()
        await until(lambda: model.is_closed)


async def test_many_sessions_generate_at_once_without_mixing(node):
    async def one(n):
        session = await node.client.create_session()
        await session.append([n, n])
        return await generate(session, 20)

    results = await asyncio.gather(*(one(n) for n in range(20)))
    assert results == [expected([n, n], 20)[0] for n in range(20)]
    stats = node.service.stats
    assert (stats.tokens_out, stats.generates_done, stats.generates_running) == (400, 20, 0)


async def test_a_node_that_is_not_there_is_unavailable():
    async with Client("127.0.0.1:1", timeout_s=60.0) as client:
        with pytest.raises(PeerUnavailable, match=r"127\.0\.0\.1:1"):
            await client.create_session()


async def test_closing_the_client_mid_stream_is_no_cancellation_of_the_caller():
    model = HashServedModel(gate=asyncio.Event())
    async with running_node(model) as node:
        client = Client(node.address)
        session = await client.create_session()
        await session.append(PROMPT)
        reader = asyncio.create_task(generate(session, 9))
        await until(lambda: node.service.stats.generates_running == 1)
        await client.aclose()
        with pytest.raises(PeerUnavailable, match="was closed"):
            await reader


@settings(max_examples=25, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 96), min_size=1, max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    budgets=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    step=st.integers(1, 4),
    seed=st.integers(0, 2**64 - 1),
)
def test_output_does_not_depend_on_how_the_prompt_was_split(prompt, cuts, budgets, step, seed):
    """INV-3, also past the window; INV-2: an operation only adds what it says."""

    async def run(parts):
        model = HashServedModel(tokens_per_step=step)
        async with running_node(model, sink_tokens=2, window_tokens=20) as node:
            session = await node.client.create_session()
            for part in parts:
                await session.append(part)
            history, outputs = prompt, []
            for budget in budgets:
                before = (await session.info()).history_length
                assert before == len(history)
                tokens = await generate(session, budget, seed=seed, temperature=1.0)
                done = session.last_done
                kept = history[:2] + history[-20:] if len(history) > 22 else history
                assert done.dropped_tokens == len(history) - len(kept)
                history = kept + tokens
                assert done.generated_tokens == len(tokens) == budget
                info = await session.info()
                assert info.history_length == len(history)
                assert info.kv_live_bytes == 8 * (len(history) - 1)
                assert (info.cache_length_violations, info.position_violations) == (0, 0)
                outputs.append(tokens)
            return outputs

    bounds = sorted({0, len(prompt), *(cut for cut in cuts if cut < len(prompt))})
    parts = [prompt[a:b] for a, b in pairwise(bounds)]

    async def both():
        assert await run(parts) == await run([prompt])

    asyncio.run(both())


class Endless(HashServedModel):
    """Streams without end; counts what was taken from it."""

    sent = 0
    is_closed = False

    async def decode(self, request):
        try:
            while True:
                self.sent += 1
                yield Tokens(token_ids=(self.sent % 97,))
        finally:
            self.is_closed = True

    async def stalls(self):
        before = -1
        while self.sent != before:
            before = self.sent
            await asyncio.sleep(0.3)


async def test_the_log_has_a_line_for_each_generation(node, caplog):
    caplog.set_level(logging.INFO, logger="kakeya.requests")
    session = await node.client.create_session()
    await session.append(PROMPT)
    await generate(session, 4)
    await generate(session, 2)
    await status_of(frames_of(node, "none"))
    await until(lambda: len(caplog.records) == 3)
    told = [record.kakeya_fields for record in caplog.records]
    assert [one["status"] for one in told] == ["OK", "OK", "NOT_FOUND"]
    ids = [f"{session.session_id}.1", f"{session.session_id}.2", "none"]
    assert [one["request_id"] for one in told] == ids
    assert [one["path"] for one in told] == ["RuntimeService/Generate"] * 3
    assert (told[0]["model"], told[0]["node"], told[0]["tokens"]) == ("toy", "this", 4)
    assert [one["prompt_tokens"] for one in told[:2]] == [3, 7]
    assert 0 <= told[0]["waited_s"] <= told[0]["first_token_s"] <= told[0]["seconds"]
