"""EngineService of an encoder: Describe, Embed, and what the memory arbiter asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import grpc.aio

from kakeya.core.errors import InvalidArgument, KakeyaError, MemoryRefused
from kakeya.core.process import resident_bytes, trim_heap
from kakeya.core.units import format_bytes
from kakeya.engine.embedding.worker import EncoderWorker, TextEncoder
from kakeya.generation.engine_wire import (
    facts_to_wire,
    footprint_to_wire,
    ids_from_wire,
    stats_to_wire,
)
from kakeya.generation.facts import EngineStats, Footprint, ModelFacts
from kakeya.v1 import engine_pb2 as pb
from kakeya.v1 import engine_pb2_grpc
from kakeya.wire.status import abort

_Answer = TypeVar("_Answer")
_Context = grpc.aio.ServicerContext[Any, Any]


class EncoderServicer(engine_pb2_grpc.EngineServiceServicer):
    """Serves one encoder; Decode and all that belongs to it is UNIMPLEMENTED."""

    def __init__(self, model: TextEncoder, worker: EncoderWorker) -> None:
        self._model = model
        self._worker = worker
        self._limit_bytes = 0

    def end_streams(self) -> None:
        """An encoder has no streams."""

    async def Describe(self, request: pb.DescribeRequest, context: _Context) -> pb.DescribeResponse:
        """The model's facts, and whether its thread still moves."""
        response = facts_to_wire(self._model.facts)
        response.model_thread_silent_seconds = self._worker.silent_s()
        return response

    async def Embed(self, request: pb.EmbedRequest, context: _Context) -> pb.EmbedResponse:
        """The vectors of texts; a call that its caller gave up is dropped before its next batch."""
        try:
            texts = [ids_from_wire(packed) for packed in request.token_ids_le32]
            check_texts(texts, request.size, self._model.facts)
            vectors = await asyncio.wrap_future(self._worker.submit(texts, request.size))
        except KakeyaError as failure:
            await abort(context, failure)
            raise
        return pb.EmbedResponse(vectors_le_f32=b"".join(vectors))

    async def Stats(self, request: pb.StatsRequest, context: _Context) -> pb.StatsResponse:
        """Live numbers of the engine."""
        return stats_to_wire(await self._on_model_thread(self._stats))

    async def SetLimits(self, request: pb.SetLimitsRequest, context: _Context) -> pb.Footprint:
        """Bound memory and spare buffers; 0 = unchanged. An encoder has no KV."""
        try:
            footprint = await self._on_model_thread(
                lambda: self._set_limits(request.memory_bytes, request.cache_bytes)
            )
        except KakeyaError as failure:
            await abort(context, failure)
            raise
        return footprint_to_wire(footprint)

    async def Shrink(self, request: pb.ShrinkRequest, context: _Context) -> pb.Footprint:
        """Give spare buffers back, between two batches."""
        return footprint_to_wire(await self._on_model_thread(self._shrink))

    def _set_limits(self, memory_bytes: int, cache_bytes: int) -> Footprint:
        now, share = self._footprint(), None
        if memory_bytes:
            other = max(0, now.resident_bytes - now.mlx_active_bytes - now.mlx_cache_bytes)
            if memory_bytes < other + now.mlx_active_bytes:
                raise MemoryRefused(
                    f"a bound of {format_bytes(memory_bytes)} is less than the model itself "
                    f"occupies, which is {format_bytes(other + now.mlx_active_bytes)}"
                )
            self._limit_bytes, share = memory_bytes, memory_bytes - other
        self._model.limit(share, cache_bytes or None)
        return self._footprint()

    def _shrink(self) -> Footprint:
        self._model.tidy()
        trim_heap()
        return self._footprint()

    def _stats(self) -> EngineStats:
        memory, footprint = self._model.memory(), self._footprint()
        return EngineStats(
            waiting=self._worker.waiting,
            mlx_active_bytes=memory.active_bytes,
            mlx_peak_bytes=memory.peak_bytes,
            resident_bytes=footprint.resident_bytes,
            footprint=footprint,
        )

    def _footprint(self) -> Footprint:
        memory = self._model.memory()
        return Footprint(
            resident_bytes=resident_bytes() or memory.active_bytes + memory.cache_bytes,
            mlx_active_bytes=memory.active_bytes,
            mlx_cache_bytes=memory.cache_bytes,
            limit_bytes=self._limit_bytes,
        )

    async def _on_model_thread(self, work: Callable[[], _Answer]) -> _Answer:
        """Await `work` done between two batches; a cancelled wait drops it if it has not begun."""
        return await asyncio.wrap_future(self._worker.call(work))


def check_texts(texts: list[list[int]], size: int, facts: ModelFacts) -> None:
    """Refuse what the model lacks: an id without an embedding would end the process.

    Raises InvalidArgument.
    """
    if not texts or not all(texts):
        raise InvalidArgument("a call needs texts, each of at least one token")
    longest, highest = max(map(len, texts)), max(map(max, texts))
    if longest > facts.context_tokens:
        raise InvalidArgument(
            f"a text has {longest} tokens; {facts.model_id} takes at most {facts.context_tokens}"
        )
    if highest >= facts.vocab_size:
        raise InvalidArgument(
            f"a text holds token id {highest}, outside the vocabulary of {facts.vocab_size}"
        )
    if size > facts.vector_size:
        raise InvalidArgument(f"a vector has {facts.vector_size} numbers, and none has {size}")
