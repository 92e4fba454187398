"""A small asyncio client of RuntimeService: sessions of token ids on any node of a fleet.

    async with Client("127.0.0.1:50051") as client:
        async with await client.create_session() as session:
            await session.append([1, 2, 3])
            async for token_id in session.generate(max_tokens=64):
                ...
            print(session.last_done)

`client.watch()` follows the fleet of the node. Failures are the errors of `kakeya.core.errors`;
tokens that were yielded before one are in the session's history, and the session can be used on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Self

import grpc.aio

from kakeya.core.clock import Clock, SystemClock
from kakeya.core.errors import PeerProtocol
from kakeya.fleet.gossip.watching import FleetChange, watch_cards
from kakeya.generation.caller import PRIORITY
from kakeya.generation.request import GenerationPriority
from kakeya.generation.retention import Retention
from kakeya.prefix.seam import CONVERSATION, Warmed, WarmOutcome, WarmReport
from kakeya.v1 import precache_pb2
from kakeya.v1 import runtime_pb2 as pb
from kakeya.v1.fleet_pb2_grpc import FleetServiceStub
from kakeya.v1.precache_pb2_grpc import PrecacheServiceStub
from kakeya.v1.runtime_pb2_grpc import RuntimeServiceStub
from kakeya.wire.calls import calling
from kakeya.wire.channels import Channels, Keepalive, is_local
from kakeya.wire.encode import fitted, in_metadata
from kakeya.wire.security import CLIENT_NAME
from kakeya.wire.tls import FolderSecurity

if TYPE_CHECKING:
    from kakeya.v1.fleet_pb2_grpc import FleetServiceAsyncStub
    from kakeya.v1.runtime_pb2_grpc import RuntimeServiceAsyncStub


class GenerateEnd(StrEnum):
    """Why a generation ended."""

    MAX_TOKENS = "max_tokens"
    EOS = "eos"
    CANCELLED = "cancelled"
    TRUNCATED = "truncated"
    UNKNOWN = "unknown"


_ENDS = {
    pb.GenerateDone.STOP_REASON_MAX_TOKENS: GenerateEnd.MAX_TOKENS,
    pb.GenerateDone.STOP_REASON_EOS: GenerateEnd.EOS,
    pb.GenerateDone.STOP_REASON_CANCELLED: GenerateEnd.CANCELLED,
    pb.GenerateDone.STOP_REASON_TRUNCATED: GenerateEnd.TRUNCATED,
}
_RETENTIONS = {
    None: precache_pb2.PREFIX_RETENTION_UNSPECIFIED,
    Retention.SHORT: precache_pb2.PREFIX_RETENTION_SHORT,
    Retention.LONG: precache_pb2.PREFIX_RETENTION_LONG,
    Retention.IN_MEMORY: precache_pb2.PREFIX_RETENTION_IN_MEMORY,
    Retention.EXTENDED: precache_pb2.PREFIX_RETENTION_EXTENDED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateSummary:
    """Summary of a generation; nodes without our extensions leave fields at 0."""

    end: GenerateEnd
    generated_tokens: int
    dropped_tokens: int
    prefill_s: float
    total_s: float
    drafted_tokens: int
    verified_tokens: int
    accepted_tokens: int
    forwards: int
    cached_tokens: int
    shadowed_tokens: int
    shadow_hit_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """A session as its node reports it."""

    history_length: int
    kv_live_bytes: int
    cache_length_violations: int
    position_violations: int
    idle_s: float


class Client:
    """A client of one node; an `async with` that closes its channel.

    In a fleet with identities, a node on another machine asks for a client certificate: `identity`
    is the data directory in which `kakeya join` made it. Any member of the fleet may then answer,
    or only `node_id`, which is checked even over loopback (the end of a tunnel, say).

    `client_name` names a client without a certificate, as the owner of its adapters. Raises
    InvalidArgument for a name with other than printable ASCII characters.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 30.0,
        keepalive: Keepalive | None = None,
        identity: Path | None = None,
        node_id: str = "",
        client_name: str = "",
        clock: Clock | None = None,
    ) -> None:
        self._address = address
        self._metadata = (
            ((CLIENT_NAME, in_metadata("client_name", client_name)),) if client_name else ()
        )
        self._timeout_s = timeout_s
        self._clock = clock or SystemClock()
        self._may_move = not node_id
        self._security = FolderSecurity(identity, node_id) if identity else None
        self._channels = Channels(
            keepalive,
            security=self._security,
            is_plain=(lambda _: False) if node_id else is_local,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the channel; sessions live on at the node until their idle time is over."""
        await self._channels.aclose()

    async def create_session(
        self, *, model_id: str = "", eos_token_ids: Sequence[int] = (), label: str = ""
    ) -> ClientSession:
        """Open a session. Without `eos_token_ids` only max_tokens and the context end a generation.

        Raises ConfigError for an identity that is missing or damaged.
        """
        stub = RuntimeServiceStub(await self._channel(self._address))
        request = fitted(
            pb.CreateSessionRequest,
            client_label=label,
            eos_token_ids=eos_token_ids,
            model_id=model_id,
        )
        with calling(self._address):
            reply = await stub.CreateSession(
                request, timeout=self._timeout_s, metadata=self._metadata
            )
        return ClientSession(stub, self._address, reply.session_id, self._timeout_s)

    async def resume_session(self, session_id: str) -> ClientSession:
        """A session that any node of the fleet has, by its id: after the loss of the address where
        it was opened. Nothing is asked yet; a call for an id that no node has raises NotFound.

        Raises ConfigError for an identity that is missing or damaged.
        """
        if self._security is not None:
            await asyncio.to_thread(self._security.refresh)
        stub = RuntimeServiceStub(self._channels.get(self._address))
        return ClientSession(stub, self._address, session_id, self._timeout_s)

    async def warm(
        self,
        token_ids: Sequence[int],
        *,
        model_id: str = "",
        conversation_id: str = "",
        retention: Retention | None = None,
        pin: bool = False,
        timeout_s: float = 150.0,
    ) -> WarmReport:
        """Warm a prefix before a session asks for it, and report the outcome.

        Without `retention` the prefix is kept for 5 minutes, and with `pin` for a day. A prefix
        that could not be warmed is no error. Raises as `create_session`.
        """
        stub = PrecacheServiceStub(await self._channel(self._address))
        request = fitted(
            precache_pb2.WarmRequest,
            model_id=model_id,
            token_ids=token_ids,
            conversation_id=conversation_id,
            retention=_RETENTIONS[retention],
            pin=pin,
        )
        with calling(self._address):
            reply = await stub.Warm(request, timeout=timeout_s, metadata=self._metadata)
        return _report(reply, self._address)

    async def watch(self) -> AsyncGenerator[FleetChange, None]:
        """Yield the fleet as the node sees it, then each change of it, without joining the fleet.

        Where the node falls silent, that is told once and the watch goes on when it is back, or,
        unless the client is for one `node_id`, at another node. Raises as `create_session`, and
        the failure of the first call.
        """

        async def connect(address: str) -> FleetServiceAsyncStub:
            return FleetServiceStub(await self._channel(address))

        changes = watch_cards(
            self._address,
            connect,
            may_move=self._may_move,
            timeout_s=self._timeout_s,
            clock=self._clock,
        )
        async with aclosing(changes):
            async for change in changes:
                yield change

    async def _channel(self, address: str) -> grpc.aio.Channel:
        if self._security is not None:
            await asyncio.to_thread(self._security.refresh)
        return self._channels.get(address)


class ClientSession:
    """One session at a node; an `async with` that closes the session."""

    def __init__(
        self, stub: RuntimeServiceAsyncStub, address: str, session_id: str, timeout_s: float
    ) -> None:
        self._stub = stub
        self._address = address
        self._session_id = session_id
        self._timeout_s = timeout_s
        self.last_done: GenerateSummary | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def session_id(self) -> str:
        """The id that the node gave the session."""
        return self._session_id

    async def append(self, token_ids: Sequence[int]) -> int:
        """Add tokens, all or none; return the history's length. Raises InvalidArgument for ids
        that the model does not have, and the failure of the call."""
        request = fitted(pb.AppendTokensRequest, session_id=self._session_id, token_ids=token_ids)
        with calling(self._address):
            reply = await self._stub.AppendTokens(request, timeout=self._timeout_s)
        return reply.history_length

    async def generate(
        self,
        max_tokens: int,
        *,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
        min_p: float | None = None,
        draft_policy: str = "",
        conversation_id: str = "",
        priority: GenerationPriority = GenerationPriority.NORMAL,
        timeout_s: float = 3600.0,
    ) -> AsyncGenerator[int, None]:
        """Yield token ids as they are committed; afterwards `last_done` is the summary.

        KV that one session of a conversation computed serves its next session, by the same id.
        Raises InvalidArgument that names a parameter out of its range. Leaving the loop early and
        closing the generator cancels the generation at the node.
        """
        self.last_done = None
        request = fitted(
            pb.GenerateRequest,
            session_id=self._session_id,
            max_tokens=max_tokens,
            seed=seed,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            draft_policy=draft_policy,
        )
        dropped = 0
        metadata = [(PRIORITY, priority.name.lower())]
        if conversation_id:
            metadata.append((CONVERSATION, in_metadata("conversation_id", conversation_id)))
        call = self._stub.Generate(request, timeout=timeout_s, metadata=tuple(metadata))
        try:
            with calling(self._address):
                async for response in call:
                    match response.WhichOneof("payload"):
                        case "token_id":
                            yield response.token_id
                        case "truncated":
                            dropped = response.truncated.dropped_token_count
                        case "done":
                            self.last_done = _summary(response.done, dropped)
                        case None:
                            raise PeerProtocol(f"{self._address} sent a frame without a payload")
                if self.last_done is None:
                    raise PeerProtocol(f"{self._address} ended a generation without a done frame")
        finally:
            call.cancel()

    async def info(self) -> SessionInfo:
        """Ask for the session's numbers; the call does not count as use of the session."""
        request = pb.GetSessionInfoRequest(session_id=self._session_id)
        with calling(self._address):
            reply = await self._stub.GetSessionInfo(request, timeout=self._timeout_s)
        return SessionInfo(
            history_length=reply.history_length,
            kv_live_bytes=reply.kv_live_bytes,
            cache_length_violations=reply.cache_invariant_inv1_violations,
            position_violations=reply.cache_invariant_inv2_violations,
            idle_s=reply.idle_seconds,
        )

    async def close(self) -> int:
        """Forget the session at the node; return its last length. A second close is NotFound."""
        request = pb.CloseSessionRequest(session_id=self._session_id)
        with calling(self._address):
            reply = await self._stub.CloseSession(request, timeout=self._timeout_s)
        return reply.final_history_length


def _report(reply: precache_pb2.WarmResponse, address: str) -> WarmReport:
    try:
        outcome = WarmOutcome(reply.status)
    except ValueError:
        raise PeerProtocol(f"{address} says {reply.status[:40]!r} of a prefix") from None
    warmed = Warmed(
        tokens=reply.token_count,
        cached=reply.cached_token_count,
        computed=reply.computed_token_count,
    )
    return WarmReport(outcome=outcome, warmed=warmed, is_pinned=reply.pinned, reason=reply.reason)


def _summary(done: pb.GenerateDone, dropped: int) -> GenerateSummary:
    return GenerateSummary(
        end=_ENDS.get(done.stop_reason, GenerateEnd.UNKNOWN),
        generated_tokens=done.generated_token_count,
        dropped_tokens=dropped,
        prefill_s=done.prefill_duration_seconds,
        total_s=done.total_duration_seconds,
        drafted_tokens=done.drafted_token_count,
        verified_tokens=done.verified_token_count,
        accepted_tokens=done.accepted_token_count,
        forwards=done.forward_count,
        cached_tokens=done.cached_token_count,
        shadowed_tokens=done.shadowed_token_count,
        shadow_hit_tokens=done.shadow_hit_token_count,
    )
