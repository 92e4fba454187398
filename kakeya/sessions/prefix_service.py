"""PrecacheService on grpc.aio: prefixes by token ids, warmed before a request needs them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

from kakeya.core.errors import InvalidArgument, KakeyaError
from kakeya.core.units import pack_ids
from kakeya.generation.facts import ModelFacts
from kakeya.generation.model import ModelDirectory
from kakeya.generation.request import MAX_PROMPT_TOKENS
from kakeya.generation.retention import Retention
from kakeya.prefix.names.keys import CacheKeys
from kakeya.prefix.seam import CacheUse, Precache, PrefixClaim, WarmReport, facts_at_hand
from kakeya.sessions.service import Context, client_of
from kakeya.sessions.session import check_vocabulary
from kakeya.v1 import precache_pb2 as pb
from kakeya.v1.precache_pb2_grpc import PrecacheServiceServicer
from kakeya.wire.status import abort

_RETENTIONS = {
    pb.PREFIX_RETENTION_UNSPECIFIED: None,
    pb.PREFIX_RETENTION_SHORT: Retention.SHORT,
    pb.PREFIX_RETENTION_LONG: Retention.LONG,
    pb.PREFIX_RETENTION_EXTENDED: Retention.EXTENDED,
    pb.PREFIX_RETENTION_IN_MEMORY: Retention.IN_MEMORY,
}


class PrecacheService(PrecacheServiceServicer):
    """Translates calls; the node decides which prefix is warmed, and when."""

    def __init__(self, models: ModelDirectory, precache: Precache) -> None:
        self._models = models
        self._precache = precache

    async def Warm(self, request: pb.WarmRequest, context: Context) -> pb.WarmResponse:
        """Warm a prefix."""
        try:
            report = await self._warm(request, client_of(context))
        except KakeyaError as error:
            await abort(context, error)
            raise
        return pb.WarmResponse(
            status=report.outcome.value,
            reason=report.reason,
            token_count=report.warmed.tokens,
            cached_token_count=report.warmed.cached,
            computed_token_count=report.warmed.computed,
            pinned=report.is_pinned,
        )

    async def Wipe(self, request: pb.WipeRequest, context: Context) -> pb.WipeResponse:
        """Drop all kept blocks and files."""
        try:
            wiped = await self._precache.wipe()
        except KakeyaError as error:
            await abort(context, error)
            raise
        return pb.WipeResponse(
            memory_blocks=wiped.blocks,
            files=wiped.files,
            has_disk=wiped.has_disk,
            kept=wiped.kept,
        )

    async def _warm(self, request: pb.WarmRequest, client: str) -> WarmReport:
        model = self._models.get(request.model_id, client)
        use = _read_use(request)
        facts = await facts_at_hand(model)
        if isinstance(facts, WarmReport):
            return facts
        token_ids = array("I", request.token_ids)
        _check(token_ids, facts)

        async def tokens() -> Sequence[int]:
            return token_ids

        claim = PrefixClaim(model_id=model.model_id, facts=facts, client=client, use=use)
        return await self._precache.warm(claim, tokens, is_pinned=request.pin)


def _read_use(request: pb.WarmRequest) -> CacheUse:
    if request.retention not in _RETENTIONS:
        raise InvalidArgument(
            f"retention is {request.retention}; it must be one of {sorted(_RETENTIONS)}",
            param="retention",
        )
    keys = CacheKeys(
        conversation_id=request.conversation_id,
        segment_hash=request.segment_hash,
        prefix_hash=request.prefix_hash,
        prompt_cache_key=request.prompt_cache_key,
    )
    if keys == CacheKeys():
        content = sha256(pack_ids(request.token_ids)).hexdigest()
        keys = CacheKeys(prefix_hash=f"ids-{content[:32]}")
    return CacheUse(keys=keys, retention=_RETENTIONS[request.retention])


def _check(token_ids: Sequence[int], facts: ModelFacts) -> None:
    most = min(facts.context_tokens - 1, MAX_PROMPT_TOKENS)
    if not 1 <= len(token_ids) <= most:
        raise InvalidArgument(
            f"token_ids holds {len(token_ids)} ids; a prefix of {facts.model_id} has 1 to {most}",
            param="token_ids",
        )
    check_vocabulary(token_ids, facts.vocab_size)
