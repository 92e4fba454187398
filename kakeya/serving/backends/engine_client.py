"""The agent's end of the socket to one engine child: EngineService as our own values."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import assert_never

import grpc
import grpc.aio

from kakeya.core.errors import InvariantBroken, KakeyaError, PeerProtocol, PeerUnavailable
from kakeya.core.units import pack_ids
from kakeya.decoding.proposer import Draft
from kakeya.runtime.generation import (
    DecodeRequest,
    Done,
    DraftSource,
    EngineStats,
    Frame,
    ModelFacts,
    Progress,
    SourceUsage,
    StopReason,
    Tokens,
    Usage,
)
from kakeya.v1 import engine_pb2 as pb
from kakeya.v1.engine_pb2_grpc import EngineServiceStub
from kakeya.wire.channels import ENGINE_MESSAGE_BYTES, Keepalive, Option, message_options
from kakeya.wire.status import error_from_rpc

_STOP_REASONS: dict[pb.DecodeDone.Reason.ValueType, StopReason] = {
    pb.DecodeDone.REASON_MAX_TOKENS: StopReason.MAX_TOKENS,
    pb.DecodeDone.REASON_STOP_TOKEN: StopReason.STOP_TOKEN,
    pb.DecodeDone.REASON_CONTEXT_FULL: StopReason.CONTEXT_FULL,
}
_DRAFT_KINDS = {"ngram": pb.DraftSource.KIND_NGRAM, "remote": pb.DraftSource.KIND_REMOTE}
CLOSE_GRACE_S = 1.0
"""Streams of a dead engine end by themselves; this is how long they may take."""


def _options(keepalive: Keepalive) -> tuple[Option, ...]:
    kept = tuple(pair for pair in keepalive.client_options() if "reconnect" not in pair[0])
    # The child binds its socket when it is ready to: look often, it costs one connect(2).
    quick: tuple[Option, ...] = (
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 250),
        ("grpc.use_local_subchannel_pool", 1),
    )
    return kept + quick + message_options(ENGINE_MESSAGE_BYTES)


class EngineClient:
    """Calls one engine. A new child gets a new socket and a new client."""

    def __init__(self, name: str, address: str, keepalive: Keepalive) -> None:
        self._name = name
        self._channel = grpc.aio.insecure_channel(address, options=_options(keepalive))
        self._stub = EngineServiceStub(self._channel)

    async def describe(self, timeout_s: float) -> ModelFacts:
        """Ask for the model's facts; waits for the socket, but not for a model that loads.

        Raises DeadlineExceeded while there is no socket, PeerUnavailable while it loads.
        """
        try:
            reply = await self._stub.Describe(
                pb.DescribeRequest(), timeout=timeout_s, wait_for_ready=True
            )
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from None
        return _facts_from_wire(reply)

    async def decode(self, request: DecodeRequest, timeout_s: float) -> AsyncGenerator[Frame, None]:
        """Stream the frames of one decode. Closing the iterator cancels the call.

        Raises PeerUnavailable when the engine is lost, InvariantBroken when it found a law broken,
        PeerProtocol for a stream without an end.
        """
        call = self._stub.Decode(_decode_to_wire(request), timeout=timeout_s)
        try:
            async for response in call:
                frame = _frame_from_wire(response)
                if frame is None:
                    continue
                yield frame
                if isinstance(frame, Done):
                    return
            raise PeerProtocol(f"{self._name}: the decode stream ended without a done frame")
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from None
        except asyncio.CancelledError:
            # Closing the channel cancels its calls; that is no cancellation of our caller.
            if _caller_is_cancelled():
                raise
            raise PeerUnavailable(f"{self._name}: the connection was closed") from None
        finally:
            call.cancel()

    async def draft(
        self,
        prefix: Sequence[int],
        size: int,
        *,
        seed: int | None,
        temperature: float | None,
        timeout_s: float,
    ) -> Draft:
        """Draft at most `size` tokens after `prefix` with this engine's model."""
        request = pb.DraftRequest(
            token_ids_le32=pack_ids(prefix), size=size, seed=seed, temperature=temperature
        )
        try:
            reply = await self._stub.Draft(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from None
        return Draft(
            source=self._name,
            tokens=tuple(reply.token_ids),
            confidence=tuple(reply.confidence),
            forward_passes=reply.forward_passes,
            peak_activation_bytes=reply.peak_activation_bytes,
            draft_us=reply.draft_us,
        )

    async def release(self, kv_key: str, timeout_s: float) -> None:
        """Forget the KV of one key."""
        try:
            await self._stub.Release(pb.ReleaseRequest(kv_key=kv_key), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from None

    async def stats(self, timeout_s: float) -> EngineStats:
        """Live numbers."""
        try:
            reply = await self._stub.Stats(pb.StatsRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from None
        return EngineStats(
            kv_live_bytes=reply.kv_live_bytes,
            kv_entries=reply.kv_entries,
            running=reply.running,
            waiting=reply.waiting,
            mlx_active_bytes=reply.mlx_active_bytes,
            mlx_peak_bytes=reply.mlx_peak_bytes,
            resident_bytes=reply.resident_bytes,
            cache_length_violations=reply.cache_length_violations,
            position_violations=reply.position_violations,
            kv_bytes_by_key=dict(reply.kv_bytes_by_key),
        )

    async def answers(self, timeout_s: float) -> bool:
        """Whether the engine's event loop answers within `timeout_s`; its model may be busy."""
        return await self.silent_s(timeout_s) is not None

    async def silent_s(self, timeout_s: float) -> float | None:
        """How long its model thread has been at one piece of work; None without an answer."""
        try:
            reply = await self._stub.Describe(pb.DescribeRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return None
        return reply.model_thread_silent_seconds

    async def aclose(self) -> None:
        """Close the channel; running streams get a moment to end by themselves."""
        await self._channel.close(grace=CLOSE_GRACE_S)

    def _failure(self, error: grpc.aio.AioRpcError) -> KakeyaError:
        details = error.details() or ""
        match error.code():
            case grpc.StatusCode.CANCELLED:
                # An engine that shuts down cancels its calls: it is lost all the same.
                return PeerUnavailable(f"{self._name}: {details}")
            case grpc.StatusCode.FAILED_PRECONDITION:
                kind, _, detail = details.partition(": ")
                return InvariantBroken(kind, detail)
            case _:
                return error_from_rpc(error, self._name)


def _caller_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _decode_to_wire(request: DecodeRequest) -> pb.DecodeRequest:
    return pb.DecodeRequest(
        token_ids_le32=pack_ids(request.token_ids),
        max_tokens=request.max_tokens,
        stop_token_ids=sorted(request.stop_token_ids),
        temperature=request.sampling.temperature,
        top_p=request.sampling.top_p,
        top_k=request.sampling.top_k,
        seed=request.sampling.seed,
        draft_sources=[_source_to_wire(source) for source in request.draft_sources],
        kv_key=request.kv_key,
    )


def _source_to_wire(source: DraftSource) -> pb.DraftSource:
    return pb.DraftSource(
        kind=_DRAFT_KINDS[source.kind],
        address=source.address,
        model_id=source.model_id,
        extended=source.extended,
        server_name=source.server_name,
    )


def _frame_from_wire(response: pb.DecodeResponse) -> Frame | None:
    kind = response.WhichOneof("frame")
    match kind:
        case "progress":
            progress = response.progress
            return Progress(
                computed_tokens=progress.computed_tokens, total_tokens=progress.total_tokens
            )
        case "tokens":
            ids = tuple(response.tokens.token_ids)
            return Tokens(token_ids=ids) if ids else None
        case "done":
            return _done_from_wire(response.done)
        case None:
            return None
        case _:
            assert_never(kind)


def _done_from_wire(done: pb.DecodeDone) -> Done:
    reason = _STOP_REASONS.get(done.reason)
    if reason is None:
        raise PeerProtocol(f"the engine ended a decode with the unknown reason {done.reason}")
    usage = Usage(
        prefill_s=done.prefill_seconds,
        total_s=done.total_seconds,
        cached_tokens=done.cached_tokens,
        forwards=done.forwards,
        drafted=done.drafted,
        verified=done.verified,
        accepted=done.accepted,
        sources=tuple(_source_usage_from_wire(source) for source in done.sources),
    )
    return Done(reason=reason, usage=usage)


def _source_usage_from_wire(stats: pb.SourceStats) -> SourceUsage:
    return SourceUsage(
        source=stats.source,
        drafts=stats.drafts,
        drafted=stats.drafted,
        verified=stats.verified,
        accepted=stats.accepted,
        abstained=stats.abstained,
        failed=stats.failed,
        late=stats.late,
        shadowed=stats.shadowed,
        shadow_hits=stats.shadow_hits,
        mean_wait_ms=stats.mean_wait_ms,
    )


def _facts_from_wire(reply: pb.DescribeResponse) -> ModelFacts:
    return ModelFacts(
        model_id=reply.model_id,
        model_path=reply.model_path,
        vocab_size=reply.vocab_size,
        context_tokens=reply.context_tokens,
        eos_token_ids=tuple(reply.eos_token_ids),
        quantization=reply.quantization,
        dtype=reply.dtype,
        weight_bytes=reply.weight_bytes,
        kv_bytes_per_token=reply.kv_bytes_per_token,
        mlx_version=reply.mlx_version,
        tokens_per_second=reply.tokens_per_second,
        prefill_tokens_per_second=reply.prefill_tokens_per_second,
        load_s=reply.load_seconds,
        prefill_chunk_tokens=reply.prefill_chunk_tokens,
        vocabulary_digest=reply.vocabulary_digest,
        device=reply.device,
        blas_accelerated=reply.blas_accelerated,
    )
