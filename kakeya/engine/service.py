"""EngineService: the engine child's side of the unix socket.

Frames come from the model thread and leave on the event loop. Tokens that several steps commit
while one frame is being sent travel in the next frame together, so a slow reader costs frames, not
steps; `max_tokens` of a request bounds its waiting tokens. When the agent cancels a call, or its
connection breaks, the generation ends before its next step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import grpc.aio

from kakeya.core.errors import InvalidArgument, KakeyaError, UnknownMethod, Unsupported
from kakeya.decoding.draft import proposer
from kakeya.decoding.draft.convert import states_from_wire
from kakeya.decoding.draft.states import HiddenStates
from kakeya.decoding.processors.grammar import GrammarMatcher
from kakeya.engine.adapters.loads import AdapterLoads
from kakeya.engine.adapters.pages import AdapterPages
from kakeya.engine.adapters.slots import EngineAdapters, LoadedAdapter
from kakeya.engine.model import Model
from kakeya.engine.outbox import FRAME_S, Outbox
from kakeya.engine.steps.scheduler import QueueTicket, Scheduler
from kakeya.engine.steps.sequence import SequenceTools
from kakeya.generation.engine_wire import (
    facts_to_wire,
    footprint_to_wire,
    ids_from_wire,
    job_from_wire,
    page_ref_from_wire,
    stats_to_wire,
)
from kakeya.generation.facts import EngineStats, Footprint
from kakeya.generation.request import DecodeJob
from kakeya.v1 import engine_pb2 as pb
from kakeya.v1 import engine_pb2_grpc
from kakeya.wire.status import abort

MAX_DRAFTED = 64
"""Most tokens of one draft for others: each is a forward between two steps of this engine."""
_Answer = TypeVar("_Answer")
_Context = grpc.aio.ServicerContext[Any, Any]


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    """Serves one model."""

    def __init__(self, model: Model, scheduler: Scheduler, tools: SequenceTools) -> None:
        self._model = model
        self._scheduler = scheduler
        self._tools = tools
        self._limits = scheduler.limits
        self._adapters = tools.adapters
        self._pages = AdapterPages()
        self._loads = AdapterLoads(self._load_adapter)

    def end_streams(self) -> None:
        """End idle streams at once, the others when their work has ended."""
        self._loads.end()

    async def Describe(self, request: pb.DescribeRequest, context: _Context) -> pb.DescribeResponse:
        """The model's facts, and whether its thread still moves."""
        facts = self._model.facts
        told = replace(facts, longest_tokens=self._limits.room.longest_tokens)
        response = facts_to_wire(told)
        response.model_thread_silent_seconds = self._scheduler.silent_s()
        return response

    async def Decode(  # type: ignore[override]
        self, request: pb.DecodeRequest, context: _Context
    ) -> None:
        """Stream one generation.

        Written, not yielded: a cancellation then ends this very frame, and with it the work.
        """
        try:
            job = job_from_wire(request)
            outbox = Outbox(asyncio.get_running_loop(), max(FRAME_S, job.frame_s))
            grammar = await self._matcher(job)
            await self._loads.behind(job.after_load)
            ticket = QueueTicket(job, outbox.put, outbox.fail, grammar)
            self._scheduler.submit(ticket)
            try:
                async for response in outbox:
                    await context.write(response)
                    self._loads.followed(job.after_load)
            finally:
                ticket.cancel()
        except KakeyaError as failure:
            await abort(context, failure)

    async def _matcher(self, job: DecodeJob) -> GrammarMatcher | None:
        """A matcher for the job's grammar, made beside the loop and the model thread."""
        if not job.grammar or not job.max_tokens:
            return None
        if self._tools.grammars is None:
            raise Unsupported(
                f"the engine of {self._model.facts.model_id} follows no grammar", param="grammar"
            )
        return await asyncio.wrap_future(self._tools.grammars.begin(job.grammar))

    async def Draft(self, request: pb.DraftRequest, context: _Context) -> pb.DraftResponse:
        """Draft with this model; an expired request is dropped before it is computed.

        Beyond the model's context there is nothing to draft, and generations of this engine wait
        meanwhile: the answer may be shorter than the size, or empty.
        """
        try:
            prefix = ids_from_wire(request.token_ids_le32)
            facts = self._model.facts
            _check_draft(prefix, request.size, facts.vocab_size)
            size = min(request.size, MAX_DRAFTED, facts.context_tokens - len(prefix))
            if size < 1:
                return pb.DraftResponse()
            seed = request.seed if request.HasField("seed") else None
            states = None
            if request.HasField("states"):
                states = states_from_wire(request.states, len(prefix))
            timer = self._tools.timer
            started = timer()
            draft = await self._on_model_thread(
                lambda: self._draft(
                    prefix, size, seed, request.temperature, max(1, request.num_steps), states
                )
            )
        except KakeyaError as failure:
            await abort(context, failure)
            raise
        return pb.DraftResponse(
            token_ids=draft.tokens,
            confidence=draft.confidence,
            forward_passes=draft.forward_passes,
            diffusion_steps=draft.diffusion_steps,
            peak_activation_bytes=draft.peak_activation_bytes,
            draft_us=int((timer() - started) * 1e6),
        )

    async def LendPages(
        self, request: pb.LendPagesRequest, context: _Context
    ) -> pb.LendPagesResponse:
        """Take pages for the KV of a parked generation."""
        pages = tuple(map(page_ref_from_wire, request.pages))
        try:
            await self._on_model_thread(
                lambda: self._scheduler.lend(request.park_id, request.number, pages)
            )
        except KakeyaError as failure:
            await abort(context, failure)
            raise
        return pb.LendPagesResponse()

    async def Release(self, request: pb.ReleaseRequest, context: _Context) -> pb.ReleaseResponse:
        """Forget the KV of one key."""
        kept = await self._on_model_thread(lambda: self._tools.slots.take(request.kv_key))
        return pb.ReleaseResponse(released_bytes=0 if kept is None else kept.nbytes)

    async def Stats(self, request: pb.StatsRequest, context: _Context) -> pb.StatsResponse:
        """Live numbers of the engine."""
        return stats_to_wire(await self._on_model_thread(self._stats))

    async def SetLimits(self, request: pb.SetLimitsRequest, context: _Context) -> pb.Footprint:
        """Bound memory, spare buffers, KV and sequences; 0 = unchanged."""
        return await self._footprint(context, lambda: self._set_limits(request))

    async def Shrink(self, request: pb.ShrinkRequest, context: _Context) -> pb.Footprint:
        """Give memory back, between two steps; KV that can lie in pages goes once pages came."""
        await self._footprint(context, lambda: self._limits.shrink(request.bytes))
        await asyncio.wrap_future(self._scheduler.settled())
        return await self._footprint(context, lambda: self._limits.shrink(0))

    async def LoadAdapters(  # type: ignore[override]
        self, requests: AsyncIterator[pb.LoadAdaptersRequest], context: _Context
    ) -> None:
        """Take adapters from pages, for as long as the agent keeps the stream open."""
        await self._loads.serve(context)

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: _Context
    ) -> pb.UnloadAdapterResponse:
        """Free an adapter's slot."""
        try:
            adapters = self._taken()
            was_loaded = await self._on_model_thread(lambda: adapters.unload(request.adapter_id))
        except KakeyaError as failure:
            await abort(context, failure)
            raise
        return pb.UnloadAdapterResponse(was_loaded=was_loaded)

    def _load_adapter(self, load: pb.AdapterLoad) -> Future[LoadedAdapter]:
        """Read on the event loop; only filling the slot is left to the model thread."""
        adapters, read = self._taken(), self._pages.read(page_ref_from_wire(load.pages))
        flight = self._scheduler.call(lambda: adapters.load(load.adapter_id, read, load.instead_of))
        flight.add_done_callback(lambda _: read.close())
        return flight

    def _taken(self) -> EngineAdapters:
        if self._adapters is None:
            raise UnknownMethod(
                f"the engine of {self._model.facts.model_id} takes no adapters; "
                "start it with --adapter-slots"
            )
        return self._adapters

    def _draft(
        self,
        prefix: list[int],
        size: int,
        seed: int | None,
        temperature: float,
        steps: int,
        states: HiddenStates | None,
    ) -> proposer.Draft:
        draft = self._model.draft(prefix, size, seed, temperature, steps, states)
        # Prefixes are kept for the next draft: that too is within the bounds.
        self._limits.holds()
        return draft

    async def _footprint(self, context: _Context, work: Callable[[], Footprint]) -> pb.Footprint:
        try:
            return footprint_to_wire(await self._on_model_thread(work))
        except KakeyaError as failure:
            await abort(context, failure)
            raise

    def _set_limits(self, request: pb.SetLimitsRequest) -> Footprint:
        limits = self._limits
        if request.max_running:
            self._scheduler.limit_running(request.max_running)
        limits.room.most_bytes = request.kv_most_bytes or limits.room.most_bytes
        try:
            return limits.set(request.memory_bytes, request.cache_bytes, request.kv_bytes)
        finally:
            if request.answers_want:
                limits.room.free_bytes = request.kv_free_bytes
                limits.wants_answered()

    def _stats(self) -> EngineStats:
        load, memory = self._scheduler.load(), self._model.memory()
        footprint = self._limits.footprint()
        by_key = self._tools.slots.bytes_by_key()
        return EngineStats(
            kv_live_bytes=self._tools.slots.held_bytes,
            kv_entries=len(by_key),
            running=load.running,
            waiting=load.waiting,
            mlx_active_bytes=memory.active_bytes,
            mlx_peak_bytes=memory.peak_bytes,
            resident_bytes=footprint.resident_bytes,
            cache_length_violations=self._tools.violations.cache_length,
            position_violations=self._tools.violations.position,
            kv_bytes_by_key=by_key,
            footprint=footprint,
            adapter_ids=self._adapters.ids() if self._adapters else (),
            batch_rows=load.batch_rows,
        )

    async def _on_model_thread(self, work: Callable[[], _Answer]) -> _Answer:
        """Await `work` done between two steps; a cancelled wait drops it if it has not begun."""
        return await asyncio.wrap_future(self._scheduler.call(work))


def _check_draft(prefix: list[int], size: int, vocab_size: int) -> None:
    """Refuse ids that the model lacks: an id without an embedding would end the process."""
    if not prefix or size < 1:
        raise InvalidArgument("a draft needs a prefix and a size of at least 1")
    if max(prefix) >= vocab_size:
        raise InvalidArgument(
            f"the prefix holds token id {max(prefix)}, outside the vocabulary of {vocab_size}"
        )
