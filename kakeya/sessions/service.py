"""RuntimeService on grpc.aio: sessions of token ids, and generation as a stream of frames.

A Generate stream is at most one `truncated`, then token ids in commit order, then exactly one
`done`. A token enters the history just before it is sent. So each token that a client has seen is
in the history, also when the call is cancelled or the engine is lost; the session stays usable.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass
from typing import Any, Self

import grpc.aio

from kakeya.core.clock import Clock
from kakeya.core.errors import InvariantBroken, KakeyaError, Refused
from kakeya.core.log import event
from kakeya.core.tasks import Supervisor, TaskHealth, every
from kakeya.dispatch.clients import Clients
from kakeya.generation.caller import peer_host, read_priority
from kakeya.generation.cuts import marked
from kakeya.generation.frames import Done, Progress, StopReason, Tokens
from kakeya.generation.model import DraftRouter, ModelDirectory
from kakeya.generation.request import DecodeRequest
from kakeya.generation.retention import Retention
from kakeya.generation.waiting import WaitTeller
from kakeya.prefix.seam import NoPrecache, Precache, PrefixClaim, read_metadata
from kakeya.sessions.mover import SessionMover
from kakeya.sessions.parameters import read_parameters
from kakeya.sessions.session import Session
from kakeya.sessions.session_log import GenerateLog, log_cut, log_failure
from kakeya.sessions.store import SessionCounts, SessionStore
from kakeya.sessions.wait_metadata import WaitMetadata
from kakeya.v1 import runtime_pb2 as pb
from kakeya.v1.runtime_pb2_grpc import RuntimeServiceServicer
from kakeya.wire.security import CLIENT_NAME
from kakeya.wire.server.authorization import calling_node
from kakeya.wire.status import abort, status_of

_log = logging.getLogger(__name__)
CONFLICT_PATIENCE_S = 0.1
"""A call that its client just cancelled may still be unwinding when the next one arrives."""
Context = grpc.aio.ServicerContext[Any, Any]

_STOP_REASONS = {
    StopReason.MAX_TOKENS: pb.GenerateDone.STOP_REASON_MAX_TOKENS,
    StopReason.STOP_TOKEN: pb.GenerateDone.STOP_REASON_EOS,
    StopReason.CONTEXT_FULL: pb.GenerateDone.STOP_REASON_TRUNCATED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeStats:
    """Counts over the service's life, but for `generates_running`, the count of this moment."""

    sessions: SessionCounts
    generates_running: int = 0
    generates_done: int = 0
    generates_failed: int = 0
    generates_cancelled: int = 0
    tokens_out: int = 0
    truncations: int = 0


class RuntimeService(RuntimeServiceServicer):
    """The servicer; an `async with` that runs the sweep of idle sessions."""

    def __init__(
        self,
        *,
        models: ModelDirectory,
        drafts: DraftRouter,
        store: SessionStore,
        clock: Clock,
        rng: random.Random,
        precache: Precache = NoPrecache(),  # noqa: B008 - it has no state
        clients: Clients | None = None,
        mover: SessionMover | None = None,
    ) -> None:
        """`mover` knows the sessions of other nodes; None = there are none."""
        self._models = models
        self._mover = mover
        self._clients = clients or Clients(clock.mono)
        self._precache = precache
        self._drafts = drafts
        self._store = store
        self._clock = clock
        self._rng = rng
        self._tasks = Supervisor(clock)
        self._draining = ""
        self._running = self._done = self._failed = self._cancelled = 0
        self._tokens_out = self._truncations = 0

    async def __aenter__(self) -> Self:
        self._tasks.start("session sweep", self._sweep_forever)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.aclose()

    @property
    def stats(self) -> RuntimeStats:
        """Counts at this moment."""
        return RuntimeStats(
            sessions=self._store.counts,
            generates_running=self._running,
            generates_done=self._done,
            generates_failed=self._failed,
            generates_cancelled=self._cancelled,
            tokens_out=self._tokens_out,
            truncations=self._truncations,
        )

    def health(self) -> tuple[TaskHealth, ...]:
        """Health of the sweep."""
        return self._tasks.health()

    def drain(self, reason: str) -> None:
        """Refuse new sessions from now on; open sessions go on."""
        self._draining = reason

    async def CreateSession(
        self, request: pb.CreateSessionRequest, context: Context
    ) -> pb.CreateSessionResponse:
        """Open a session on a model of this node."""
        try:
            session = await self._create(request, context)
            claim = _claim(session, context)
            if not claim.use.is_empty:
                self._precache.opened(claim)
        except KakeyaError as error:
            await abort(context, error)
            raise
        return pb.CreateSessionResponse(session_id=session.session_id)

    async def AppendTokens(
        self, request: pb.AppendTokensRequest, context: Context
    ) -> pb.AppendTokensResponse:
        """Add tokens to a history, all or none."""
        try:
            await self._settle(request.session_id)
            with self._store.operation(request.session_id, "AppendTokens") as session:
                length = session.append(request.token_ids)
        except KakeyaError as error:
            await abort(context, error)
            raise
        return pb.AppendTokensResponse(history_length=length)

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: Context
    ) -> pb.CloseSessionResponse:
        """Forget a session and its KV."""
        try:
            await self._settle(request.session_id)
            session = self._store.close(request.session_id)
        except KakeyaError as error:
            await abort(context, error)
            raise
        await session.model.release(session.session_id)
        return pb.CloseSessionResponse(final_history_length=session.history_length)

    async def GetSessionInfo(
        self, request: pb.GetSessionInfoRequest, context: Context
    ) -> pb.GetSessionInfoResponse:
        """Look at a session; its idle time goes on."""
        try:
            if self._mover is not None:
                await self._mover.bring(request.session_id)
            session = self._store.get(request.session_id)
        except KakeyaError as error:
            await abort(context, error)
            raise
        stats = await session.model.stats()
        return pb.GetSessionInfoResponse(
            history_length=session.history_length,
            kv_live_bytes=stats.kv_bytes_by_key.get(session.kv_key, 0),
            cache_invariant_inv1_violations=session.cache_length_violations,
            cache_invariant_inv2_violations=session.position_violations,
            idle_seconds=session.idle_s(self._clock.mono()),
        )

    async def Generate(  # type: ignore[override]
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        """Stream a generation.

        The frames are sent by `context.write`: a cancellation is then raised here, in the frame
        that holds the engine's stream, and not in a suspended generator.
        """
        self._running += 1
        log = GenerateLog(request.session_id, self._clock.mono)
        try:
            await self._generate(request, context, log)
        except KakeyaError as error:
            self._failed += 1
            log.status = status_of(error)
            await abort(context, error)
        except asyncio.CancelledError:
            self._cancelled += 1
            log.status = grpc.StatusCode.CANCELLED
            raise
        else:
            self._done += 1
            log.status = grpc.StatusCode.OK
        finally:
            self._running -= 1
            log.write()

    async def _create(self, request: pb.CreateSessionRequest, context: Context) -> Session:
        time_left_s, client = context.time_remaining(), client_of(context)
        priority = read_priority(context.invocation_metadata() or ())
        if self._draining and not (self._mover and self._mover.passes_on):
            raise Refused(f"this node takes no new sessions: {self._draining}")
        model = self._models.get(request.model_id, client)
        self._store.check_room()
        most_s = self._store.limits.model_wait_s if time_left_s is None else time_left_s
        async with WaitMetadata(context, WaitTeller(model.waits_for), self._clock):
            facts = await model.ready(most_s, priority)
        session = self._store.create(
            model,
            facts,
            stop_token_ids=frozenset(request.eos_token_ids),
            label=request.client_label,
        )
        session.client = client
        self._store.on_idle(session)
        return session

    async def _generate(
        self, request: pb.GenerateRequest, context: Context, log: GenerateLog
    ) -> None:
        await self._settle(request.session_id)
        with self._store.operation(request.session_id, "Generate") as session:
            log.begin(session)
            parameters = read_parameters(request, session, self._rng)
            sources = self._drafts.sources(session.facts, request.draft_policy)
            priority = read_priority(context.invocation_metadata() or ())
            claim = _claim(session, context)
            # A conversation keeps its KV though it opens a session for each turn.
            session.kv_key = self._precache.kv_key(claim) or session.session_id
            wait = WaitMetadata(context, teller := WaitTeller(session.model.waits_for), self._clock)
            has_begun = await self._truncate(session, parameters.max_tokens, context)
            cuts = claim.use.cuts(session.history_length)
            asked = DecodeRequest(
                token_ids=session.history,
                max_tokens=parameters.max_tokens,
                stop_token_ids=session.stop_token_ids,
                sampling=parameters.sampling,
                draft_sources=sources,
                draft_policy=request.draft_policy,
                kv_key=session.kv_key,
                deadline_s=context.time_remaining(),
                client=claim.client or peer_host(context.peer()),
                priority=priority,
                kv_retention=claim.use.retention or Retention.LONG,
                cuts=cuts,
                wait=teller,
            )
            try:
                async with AsyncExitStack() as held:
                    if not has_begun:
                        await held.enter_async_context(wait)
                    done, committed = await self._stream(session, asked, context, wait, log)
            except InvariantBroken as broken:
                log_failure(session, broken)
                await session.model.release(session.kv_key)
                raise
            self._turn_ended(session, claim, cuts)
        await context.write(pb.GenerateResponse(done=_done_to_wire(done, committed)))

    def _turn_ended(self, session: Session, claim: PrefixClaim, cuts: Sequence[int]) -> None:
        if claim.use.is_empty:
            return
        history = marked(session.history, cuts)

        async def tokens() -> Sequence[int]:
            return history

        self._precache.turn_ended(claim, tokens)

    async def _settle(self, session_id: str) -> None:
        if self._mover is not None:
            await self._mover.bring(session_id)
        session = self._store.get(session_id)
        if session.is_busy:
            with suppress(TimeoutError):
                async with asyncio.timeout(CONFLICT_PATIENCE_S):
                    await session.idle.wait()

    async def _truncate(self, session: Session, max_tokens: int, context: Context) -> bool:
        """Cut the history to its window; True = it was, and the client was told."""
        dropped = session.truncate(max_tokens)
        if dropped:
            self._truncations += 1
            log_cut(session, dropped)
            truncated = pb.HistoryTruncated(dropped_token_count=dropped)
            await context.write(pb.GenerateResponse(truncated=truncated))
        return bool(dropped)

    async def _stream(
        self,
        session: Session,
        asked: DecodeRequest,
        context: Context,
        wait: WaitMetadata,
        log: GenerateLog,
    ) -> tuple[Done, int]:
        before, committed = session.history_length, 0
        async with AsyncExitStack() as held:
            use = held.enter_context(self._clients.request(asked.client, asked.user))
            frames = await held.enter_async_context(aclosing(session.model.decode(asked)))
            async for frame in frames:
                if not use.has_begun:
                    use.begin()
                    await wait.over()
                log.saw(frame, session.history_length)
                match frame:
                    case Tokens():
                        for token_id in frame.token_ids:
                            session.commit(token_id)
                            committed += 1
                            self._tokens_out += 1
                            await context.write(pb.GenerateResponse(token_id=token_id))
                    case Done():
                        session.check_monotone(before, committed)
                        return frame, committed
                    case Progress():
                        pass
        raise InvariantBroken("stream", "a decode ended without its done frame")

    async def _sweep_forever(self) -> None:
        interval_s = self._store.limits.sweep_interval_s
        await every(interval_s, self.sweep, clock=self._clock, rng=self._rng)

    async def sweep(self) -> None:
        """Forget the sessions past their idle time, and their KV."""
        gone = self._store.sweep()
        for session in gone:
            await session.model.release(session.session_id)
        if gone:
            event(_log, "idle sessions expired", sessions=len(gone))


def _claim(session: Session, context: Context) -> PrefixClaim:
    """Read the claim of a call on the prefix of its session. Raises InvalidArgument."""
    return PrefixClaim(
        model_id=session.model.model_id,
        facts=session.facts,
        client=client_of(context) or session.client,
        use=read_metadata(
            (key, value) for key, value in context.invocation_metadata() or () if value
        ),
    )


def client_of(context: Context) -> str:
    """The caller: the node id of its certificate, or without a certificate the name that it gives.

    Such a name counts on this machine and in a fleet without identities, where no caller can prove
    its name: it keeps honest clients apart.
    """
    if proven := calling_node():
        return proven
    for key, value in context.invocation_metadata() or ():
        if key == CLIENT_NAME and isinstance(value, str):
            return value
    return ""


def _done_to_wire(done: Done, committed: int) -> pb.GenerateDone:
    usage = done.usage
    return pb.GenerateDone(
        stop_reason=_STOP_REASONS[done.reason],
        generated_token_count=committed,
        prefill_duration_seconds=usage.prefill_s,
        total_duration_seconds=usage.total_s,
        drafted_token_count=usage.drafted,
        verified_token_count=usage.verified,
        accepted_token_count=usage.accepted,
        forward_count=usage.forwards,
        cached_token_count=usage.cached_tokens,
        shadowed_token_count=sum(source.shadowed for source in usage.sources),
        shadow_hit_token_count=sum(source.shadow_hits for source in usage.sources),
    )
