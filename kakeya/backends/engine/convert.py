"""The messages of EngineService as our own values, and back."""

from __future__ import annotations

from typing import assert_never

from kakeya.core.errors import PeerProtocol
from kakeya.core.units import pack_ids
from kakeya.generation.facts import EngineStats, Footprint, ModelFacts
from kakeya.generation.frames import Done, Frame, Progress, SourceUsage, StopReason, Tokens, Usage
from kakeya.generation.kv import KvExchange, KvOffer, KvPages, PageRef
from kakeya.generation.request import DecodeRequest, DraftSource
from kakeya.v1 import engine_pb2 as pb

_STOP_REASONS: dict[pb.DecodeDone.Reason.ValueType, StopReason] = {
    pb.DecodeDone.REASON_MAX_TOKENS: StopReason.MAX_TOKENS,
    pb.DecodeDone.REASON_STOP_TOKEN: StopReason.STOP_TOKEN,
    pb.DecodeDone.REASON_CONTEXT_FULL: StopReason.CONTEXT_FULL,
}
_NOTHING = KvOffer()
_AT_ONCE_S = 1e-6
"""A deadline that is over: 0 would say that there is none."""
_DRAFT_KINDS = {"ngram": pb.DraftSource.KIND_NGRAM, "remote": pb.DraftSource.KIND_REMOTE}


def decode_to_wire(
    request: DecodeRequest, offer: KvOffer = _NOTHING, park_id: int = 0, after_load: int = 0
) -> pb.DecodeRequest:
    """The request of one generation, with what its engine may begin from, its name there, and the
    number of the load that it comes behind."""
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
        adapter_id=request.adapter_id,
        client=request.client,
        user=request.user,
        priority=request.priority,
        deadline_seconds=0.0 if request.deadline_s is None else max(_AT_ONCE_S, request.deadline_s),
        frame_ms=round(1000 * request.frame_s),
        kv_blocks=[_kv_pages_to_wire(block) for block in offer.blocks],
        kv_exports=[_kv_pages_to_wire(block) for block in offer.exports],
        cuts=request.cuts,
        park_id=park_id,
        logits_le_f32=offer.logits,
        wants_logits=offer.wants_logits,
        after_load=after_load,
    )


def _kv_pages_to_wire(block: KvPages) -> pb.KvBlock:
    return pb.KvBlock(
        index=block.index,
        pages=page_ref_to_wire(block.pages),
        has_state=block.has_state,
        tokens=block.tokens,
        is_cut=block.is_cut,
    )


def _source_to_wire(source: DraftSource) -> pb.DraftSource:
    return pb.DraftSource(
        kind=_DRAFT_KINDS[source.kind],
        address=source.address,
        model_id=source.model_id,
        extended=source.extended,
        server_name=source.server_name,
    )


def frames_of(message: pb.DecodeResponse) -> tuple[pb.DecodeResponse, ...]:
    """The frames of one message of a decode, in order."""
    return (message, *message.following)


def frame_from_wire(response: pb.DecodeResponse, kv: KvExchange | None = None) -> Frame | None:
    """A frame; None for one without content, and for what only `kv` is told.

    Raises PeerProtocol for an unknown end.
    """
    kind = response.WhichOneof("frame")
    match kind:
        case "imported":
            if kv is not None:
                kv.imported(response.imported.tokens)
            return None
        case "exported":
            if kv is not None:
                kv.exported(response.exported.index, response.exported.tokens)
            return None
        case "logits":
            if kv is not None:
                kv.history_logits(response.logits.le_f32)
            return None
        case "park":
            return None  # who has the call answers it by another
        case "progress":
            progress = response.progress
            return Progress(
                computed_tokens=progress.computed_tokens,
                total_tokens=progress.total_tokens,
                cached_tokens=progress.cached_tokens,
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


def facts_from_wire(reply: pb.DescribeResponse) -> ModelFacts:
    """What an engine says of its model."""
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
        kv_fixed_bytes=reply.kv_fixed_bytes,
        mlx_version=reply.mlx_version,
        tokens_per_second=reply.tokens_per_second,
        prefill_tokens_per_second=reply.prefill_tokens_per_second,
        load_s=reply.load_seconds,
        prefill_chunk_tokens=reply.prefill_chunk_tokens,
        vocabulary_digest=reply.vocabulary_digest,
        device=reply.device,
        blas_accelerated=reply.blas_accelerated,
        adapter_slots=reply.adapter_slots,
        adapter_rank=reply.adapter_rank,
        base_fingerprint=reply.base_fingerprint,
        batch_rows=reply.batch_rows or 1,
        kv_block_tokens=reply.kv_block_tokens,
        kv_block_bytes=reply.kv_block_bytes,
        kv_state_bytes=reply.kv_state_bytes,
        kv_layout=reply.kv_layout,
        kv_exactness=reply.kv_exactness,
        weights_state=reply.weights_state,
        prefill_grid=tuple((piece.position, piece.tokens) for piece in reply.prefill_grid),
    )


def stats_from_wire(reply: pb.StatsResponse) -> EngineStats:
    """Live numbers."""
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
        footprint=footprint_from_wire(reply.footprint) if reply.HasField("footprint") else None,
        adapter_ids=tuple(reply.adapter_ids),
        batch_rows=reply.batch_rows,
    )


def footprint_from_wire(reply: pb.Footprint) -> Footprint:
    """What an engine occupies."""
    return Footprint(
        resident_bytes=reply.resident_bytes,
        mlx_active_bytes=reply.mlx_active_bytes,
        mlx_cache_bytes=reply.mlx_cache_bytes,
        idle_kv_bytes=reply.idle_kv_bytes,
        limit_bytes=reply.limit_bytes,
    )


def page_ref_to_wire(ref: PageRef) -> pb.PageRef:
    """Where a block lies in shared memory."""
    return pb.PageRef(
        slab=ref.slab,
        slab_pages=ref.slab_pages,
        page_bytes=ref.page_bytes,
        first=ref.first,
        pages=ref.pages,
        length=ref.length,
        stamp=ref.stamp,
    )
