"""EngineService: the engine child's side of the unix socket.

Frames come from the model thread and leave on the event loop. What several steps commit while
one frame is being sent travels in the next frame together, so a slow reader costs frames, not
steps; what waits is bounded by max_tokens of its own request. A call that the agent cancels, or
whose connection breaks, cancels the generation before its next step.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import grpc.aio

from kakeya.core.errors import InvalidArgument, KakeyaError
from kakeya.core.units import unpack_ids
from kakeya.decoding.decoder import FinishReason
from kakeya.decoding.sampling import SamplingParams
from kakeya.engine.job import (
    DecodeJob,
    DoneFrame,
    EngineFrame,
    PrefillFrame,
    SourceSpec,
    TokensFrame,
)
from kakeya.engine.model import Model
from kakeya.engine.scheduler import Scheduler, Ticket
from kakeya.engine.sequence import SequenceTools
from kakeya.v1 import engine_pb2 as pb
from kakeya.v1 import engine_pb2_grpc
from kakeya.wire.status import abort

_Answer = TypeVar("_Answer")
_Context = grpc.aio.ServicerContext[Any, Any]
FRAME_S = 0.02
"""The least time between two messages of one stream, ends excepted."""
_REASONS = {
    FinishReason.MAX_TOKENS: pb.DecodeDone.REASON_MAX_TOKENS,
    FinishReason.STOP_TOKEN: pb.DecodeDone.REASON_STOP_TOKEN,
    FinishReason.CONTEXT_FULL: pb.DecodeDone.REASON_CONTEXT_FULL,
}


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    """Serves one model."""

    def __init__(self, model: Model, scheduler: Scheduler, tools: SequenceTools) -> None:
        self._model = model
        self._scheduler = scheduler
        self._tools = tools

    async def Describe(self, request: pb.DescribeRequest, context: _Context) -> pb.DescribeResponse:
        """The model's facts, and whether its thread still comes round."""
        facts = self._model.facts
        return pb.DescribeResponse(
            model_id=facts.model_id,
            model_path=facts.model_path,
            vocab_size=facts.vocab_size,
            context_tokens=facts.context_tokens,
            eos_token_ids=facts.eos_token_ids,
            quantization=facts.quantization,
            dtype=facts.dtype,
            weight_bytes=facts.weight_bytes,
            kv_bytes_per_token=facts.kv_bytes_per_token,
            mlx_version=facts.mlx_version,
            tokens_per_second=facts.tokens_per_second,
            prefill_tokens_per_second=facts.prefill_tokens_per_second,
            load_seconds=facts.load_s,
            prefill_chunk_tokens=facts.prefill_chunk_tokens,
            vocabulary_digest=facts.vocabulary_digest,
            device=facts.device,
            blas_accelerated=facts.blas_accelerated,
            model_thread_silent_seconds=self._scheduler.silent_s(),
        )

    async def Decode(  # type: ignore[override]
        self, request: pb.DecodeRequest, context: _Context
    ) -> None:
        """Stream one generation.

        Written, not yielded: a cancellation then ends this very frame, and with it the work.
        """
        try:
            outbox = _Outbox(asyncio.get_running_loop())
            ticket = Ticket(_job_from_wire(request), outbox.put, outbox.fail)
            self._scheduler.submit(ticket)
            try:
                async for response in outbox:
                    await context.write(response)
            finally:
                ticket.cancel()
        except KakeyaError as failure:
            await abort(context, failure)

    async def Draft(self, request: pb.DraftRequest, context: _Context) -> pb.DraftResponse:
        """Draft with this model; an expired request is dropped before it is computed.

        Beyond the model's context there is nothing to draft: the answer is then short or empty.
        """
        try:
            prefix = _ids(request.token_ids_le32)
            facts = self._model.facts
            _check_draft(prefix, request.size, facts.vocab_size)
            size = min(request.size, facts.context_tokens - len(prefix))
            if size < 1:
                return pb.DraftResponse()
            seed = request.seed if request.HasField("seed") else None
            timer = self._tools.timer
            started = timer()
            draft = await self._on_model_thread(
                lambda: self._model.draft(prefix, size, seed, request.temperature)
            )
        except KakeyaError as failure:
            await abort(context, failure)
            raise
        return pb.DraftResponse(
            token_ids=draft.tokens,
            confidence=draft.confidence,
            forward_passes=draft.forward_passes,
            draft_us=int((timer() - started) * 1e6),
        )

    async def Release(self, request: pb.ReleaseRequest, context: _Context) -> pb.ReleaseResponse:
        """Forget the KV of one key."""
        kept = await self._on_model_thread(lambda: self._tools.slots.take(request.kv_key))
        return pb.ReleaseResponse(released_bytes=0 if kept is None else kept.nbytes)

    async def Stats(self, request: pb.StatsRequest, context: _Context) -> pb.StatsResponse:
        """Live numbers."""
        return await self._on_model_thread(self._stats)

    def _stats(self) -> pb.StatsResponse:
        load, memory = self._scheduler.load(), self._model.memory()
        by_key = self._tools.slots.bytes_by_key()
        return pb.StatsResponse(
            kv_live_bytes=self._tools.slots.held_bytes,
            kv_entries=len(by_key),
            running=load.running,
            waiting=load.waiting,
            mlx_active_bytes=memory.active_bytes,
            mlx_peak_bytes=memory.peak_bytes,
            resident_bytes=_peak_resident_bytes(),
            cache_length_violations=self._tools.violations.cache_length,
            position_violations=self._tools.violations.position,
            kv_bytes_by_key=by_key,
        )

    async def _on_model_thread(self, work: Callable[[], _Answer]) -> _Answer:
        """Await `work` done between two steps; a cancelled wait drops it if it has not begun."""
        return await asyncio.wrap_future(self._scheduler.call(work))


class _Outbox:
    """Frames of one generation on their way from the model thread to the wire.

    The first frame and the last leave at once, those between at most every FRAME_S: a fast model
    commits several tokens in that time, and one message for all of them leaves the processor to
    the model. Slow models, whose steps take longer, are never held up.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._frames: deque[EngineFrame | KakeyaError] = deque()
        self._filled = asyncio.Event()
        self._ended = asyncio.Event()

    def put(self, frame: EngineFrame) -> None:
        """Add a frame; called on the model thread."""
        self._frames.append(frame)
        if isinstance(frame, DoneFrame):
            self._loop.call_soon_threadsafe(self._end)
        # One wake-up is enough for all that is appended before the loop looks.
        elif len(self._frames) == 1:
            self._loop.call_soon_threadsafe(self._filled.set)

    def fail(self, failure: KakeyaError) -> None:
        """End with an error; called on the model thread."""
        self._frames.append(failure)
        self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self._ended.set()
        self._filled.set()

    async def __aiter__(self) -> AsyncIterator[pb.DecodeResponse]:
        """Yield responses until the last frame."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            for response in self._drain():
                yield response
                if response.HasField("done"):
                    return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FRAME_S):
                    await self._ended.wait()

    def _drain(self) -> list[pb.DecodeResponse]:
        """Take all frames; committed tokens that follow each other become one response."""
        responses: list[pb.DecodeResponse] = []
        tokens: list[int] = []
        while self._frames:
            frame = self._frames.popleft()
            if isinstance(frame, TokensFrame):
                tokens += frame.token_ids
                continue
            if isinstance(frame, KakeyaError):
                raise frame
            if tokens:
                responses.append(_tokens_to_wire(tokens))
                tokens = []
            responses.append(_to_wire(frame))
        if tokens:
            responses.append(_tokens_to_wire(tokens))
        return responses


def _tokens_to_wire(tokens: list[int]) -> pb.DecodeResponse:
    return pb.DecodeResponse(tokens=pb.CommittedTokens(token_ids=tokens))


def _to_wire(frame: PrefillFrame | DoneFrame) -> pb.DecodeResponse:
    if isinstance(frame, PrefillFrame):
        return pb.DecodeResponse(
            progress=pb.PrefillProgress(
                computed_tokens=frame.computed_tokens, total_tokens=frame.total_tokens
            )
        )
    return pb.DecodeResponse(
        done=pb.DecodeDone(
            reason=_REASONS[frame.reason],
            prefill_seconds=frame.prefill_s,
            total_seconds=frame.total_s,
            cached_tokens=frame.cached_tokens,
            forwards=frame.forwards,
            drafted=frame.drafted,
            verified=frame.verified,
            accepted=frame.accepted,
            sources=[
                pb.SourceStats(
                    source=tally.source,
                    drafts=tally.drafts,
                    drafted=tally.drafted,
                    verified=tally.verified,
                    accepted=tally.accepted,
                    abstained=tally.abstained,
                    failed=tally.failed,
                    late=tally.late,
                    shadowed=tally.shadowed,
                    shadow_hits=tally.shadow_hits,
                    mean_wait_ms=1000 * tally.wait_s / max(1, tally.drafts),
                )
                for tally in frame.sources
            ],
        )
    )


def _ids(packed: bytes) -> list[int]:
    try:
        return unpack_ids(packed)
    except ValueError:
        raise InvalidArgument(
            f"token ids take 4 bytes each; {len(packed)} bytes is no multiple of 4"
        ) from None


def _check_draft(prefix: list[int], size: int, vocab_size: int) -> None:
    """Refuse what the model cannot take: an id without an embedding would end the process."""
    if not prefix or size < 1:
        raise InvalidArgument("a draft needs a prefix and a size of at least 1")
    if max(prefix) >= vocab_size:
        raise InvalidArgument(
            f"the prefix holds token id {max(prefix)}, outside the vocabulary of {vocab_size}"
        )


def _job_from_wire(request: pb.DecodeRequest) -> DecodeJob:
    return DecodeJob(
        token_ids=_ids(request.token_ids_le32),
        max_tokens=request.max_tokens,
        stop_token_ids=frozenset(request.stop_token_ids),
        sampling=SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p or 1.0,
            top_k=request.top_k,
            seed=request.seed,
        ),
        sources=tuple(
            SourceSpec(
                kind="ngram" if source.kind == pb.DraftSource.KIND_NGRAM else "remote",
                address=source.address,
                model_id=source.model_id,
                extended=source.extended,
                server_name=source.server_name,
            )
            for source in request.draft_sources
        ),
        kv_key=request.kv_key,
    )


def _peak_resident_bytes() -> int:
    """Largest resident set so far; Linux counts KiB, macOS bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
