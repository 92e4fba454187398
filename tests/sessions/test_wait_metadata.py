"""A call that waits for its model tells it in its initial metadata, once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field

import grpc.aio
import pytest

from kakeya.core import errors
from kakeya.generation.facts import ModelFacts
from kakeya.generation.frames import Frame
from kakeya.generation.request import DecodeRequest, GenerationPriority
from kakeya.generation.waiting import RequestWait, WaitReason
from kakeya.sessions.store import SessionLimits
from kakeya.sessions.wait_metadata import TOLD_AFTER_S, WAITING
from kakeya.v1 import runtime_pb2 as pb
from tests.memory.worlds import ManualClock
from tests.sessions.conftest import running_node
from tests.sessions.toy import HashServedModel


@dataclass
class LateModel(HashServedModel):
    """In line for memory until `is_there`."""

    is_there: asyncio.Event = field(default_factory=asyncio.Event)
    is_asked: asyncio.Event = field(default_factory=asyncio.Event)
    is_told: asyncio.Event = field(default_factory=asyncio.Event)
    refusal: errors.KakeyaError | None = None
    patience_s: list[float] = field(default_factory=list)

    def waits_for(self) -> RequestWait | None:
        self.is_told.set()
        if self.is_there.is_set():
            return None
        return RequestWait(reason=WaitReason.MEMORY, model_id="toy-é", position=2, seconds=7.2)

    async def ready(
        self, timeout_s: float, priority: GenerationPriority = GenerationPriority.NORMAL
    ) -> ModelFacts:
        self.patience_s.append(timeout_s)
        self.is_asked.set()
        await self.is_there.wait()
        if self.refusal is not None:
            raise self.refusal
        return await super().ready(timeout_s, priority)

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[Frame, None]:
        self.is_asked.set()
        await self.is_there.wait()
        async for frame in super().decode(request):
            yield frame


async def a_moment(model: LateModel, clock: ManualClock) -> None:
    await model.is_asked.wait()
    model.is_asked.clear()
    clock.advance(TOLD_AFTER_S)
    await model.is_told.wait()
    model.is_told.clear()


def told(metadata: grpc.aio.Metadata | None) -> Mapping[str, str]:
    return {key: value for key, value in metadata or () if isinstance(value, str)}


async def test_a_session_and_a_generation_tell_that_they_wait() -> None:
    model, clock = LateModel(), ManualClock()
    async with running_node(model, clock) as node:
        creating = node.stub.CreateSession(pb.CreateSessionRequest(model_id="toy"))
        await a_moment(model, clock)
        model.is_there.set()
        session = (await creating).session_id
        said = told(await creating.initial_metadata())
        assert said[WAITING] == "2nd for memory, toy-?, about 7 s"
        assert model.patience_s == [SessionLimits().model_wait_s] == [120.0]

        model.is_there.clear()
        await node.stub.AppendTokens(pb.AppendTokensRequest(session_id=session, token_ids=[5]))
        asked = pb.GenerateRequest(session_id=session, max_tokens=3)
        call = node.stub.Generate(asked)
        await a_moment(model, clock)
        assert told(await call.initial_metadata())[WAITING].startswith("2nd for memory")
        model.is_there.set()
        assert [one async for one in call][-1].HasField("done")

        quick = node.stub.Generate(asked)
        assert [one async for one in quick][-1].HasField("done")
        assert WAITING not in told(await quick.initial_metadata())


async def test_a_call_waits_until_its_deadline_and_its_refusal_says_when_to_come_again() -> None:
    refusal = errors.ModelLoading("toy loads for 34 s more", retry_after_s=34.0)
    model, clock = LateModel(refusal=refusal), ManualClock()
    async with running_node(model, clock) as node:
        creating = node.stub.CreateSession(pb.CreateSessionRequest(model_id="toy"), timeout=300)
        await a_moment(model, clock)
        assert model.patience_s == [pytest.approx(300, abs=5)]
        model.is_there.set()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await creating
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        said = told(refused.value.trailing_metadata())
        assert (said["kakeya-error"], said["retry-after"]) == ("model_loading", "34")
