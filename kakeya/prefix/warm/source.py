"""Computes prefixes with the models of this node, behind all requests: `WarmSource`.

No model is loaded for a prefix, and where a model waits for room in memory, the work gives way: it
would hold the model that has to leave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Protocol

from kakeya.core.errors import Denied, InvariantBroken, NotFound
from kakeya.core.units import format_bytes
from kakeya.generation.cuts import unmarked
from kakeya.generation.facts import ModelFacts
from kakeya.generation.frames import Done
from kakeya.generation.model import ModelDirectory
from kakeya.generation.request import DecodeRequest, GenerationPriority
from kakeya.generation.retention import BlockClass, Retention
from kakeya.prefix.seam import Tokens, Warmed, WarmOutcome, WarmReport, facts_at_hand
from kakeya.prefix.warm.warming import Prefix


class KeptPrefixes(Protocol):
    """The KV in pages: `NodePrefixes`. An adapter is named as its engine knows it."""

    @property
    def is_on(self) -> bool:
        """Whether any KV is kept."""
        ...

    def keep(
        self,
        model_id: str,
        adapter_id: str,
        token_ids: Sequence[int],
        retention: Retention,
        *,
        block_class: BlockClass,
        pin: str = "",
    ) -> int:
        """Refresh the blocks of a prefix; how many tokens from its beginning. With a name for a
        pin, they are pinned in place of the earlier pin of that name."""
        ...

    @property
    def most_pinned_bytes(self) -> int:
        """The bytes that all pins may take together."""
        ...

    def pinned_bytes(
        self, model_id: str, adapter_id: str, token_ids: Sequence[int], pin: str
    ) -> int:
        """The bytes that all pins take, if this one holds the blocks of this prefix."""
        ...

    def release(self, pin: str) -> None:
        """End a pin."""
        ...

    async def has_name(self, facts: ModelFacts) -> bool:
        """Whether the weights of a model have their name, without which no KV of it is kept; it is
        waited for some seconds."""
        ...

    def free_bytes(self) -> int:
        """The bytes that speculative KV may take."""
        ...

    def bytes_of(self, facts: ModelFacts, tokens: int) -> int:
        """The bytes that so many more tokens of a model would take."""
        ...


class RegisteredAdapter(Protocol):
    """An adapter as its engine knows it."""

    @property
    def base(self) -> str:
        """The model that it is for."""
        ...

    @property
    def version(self) -> str:
        """Its name in the engine: another one when its content is another."""
        ...


class ModelSource:
    """See the module.

    `adapter` finds an adapter for a client; `is_needed` says whether a model waits for room.
    """

    def __init__(
        self,
        models: ModelDirectory,
        prefixes: KeptPrefixes,
        *,
        adapter: Callable[[str, str], RegisteredAdapter],
        is_needed: Callable[[], bool],
    ) -> None:
        self._models = models
        self._prefixes = prefixes
        self._adapter = adapter
        self._is_needed = is_needed

    async def refuse(self, prefix: Prefix) -> WarmReport | None:
        """Why this cannot be computed now."""
        if not self._prefixes.is_on:
            reason = "this node keeps no prefixes: precache.memory_mb is 0"
            return WarmReport(outcome=WarmOutcome.NO_ROOM, reason=reason)
        try:
            facts = await facts_at_hand(self._models.get(prefix.model_id, prefix.client))
        except (NotFound, Denied) as unknown:
            return WarmReport(outcome=WarmOutcome.AWAY, reason=unknown.message)
        if isinstance(facts, WarmReport):
            return facts
        if not facts.kv_block_tokens:
            reason = f"the KV of {facts.model_id} cannot be kept in blocks"
            return WarmReport(outcome=WarmOutcome.NO_ROOM, reason=reason)
        return _GIVES_WAY if self._is_needed() else None

    async def keep(self, prefix: Prefix, tokens: Tokens) -> int:
        """Refresh the blocks of a prefix."""
        return self._keep(prefix, tokens, pin="")

    async def refuse_pin(self, prefix: Prefix, tokens: Tokens, missing: int) -> WarmReport | None:
        """Why this cannot be pinned: all pins together may take a part of the pages."""
        prefixes = self._prefixes
        needed_bytes = prefixes.pinned_bytes(*self._names(prefix), tokens, prefix.key)
        if missing > 0:
            facts = await facts_at_hand(self._models.get(prefix.model_id, prefix.client))
            if isinstance(facts, WarmReport):
                return facts
            needed_bytes += prefixes.bytes_of(facts, missing)
        if needed_bytes <= prefixes.most_pinned_bytes:
            return None
        reason = (
            f"pins would take {format_bytes(needed_bytes)}, and may take "
            f"{format_bytes(prefixes.most_pinned_bytes)} together, which is half of "
            f"precache.memory_mb: send others without pin, or wait until they end"
        )
        return WarmReport(outcome=WarmOutcome.NO_ROOM, reason=reason)

    def pin(self, prefix: Prefix, tokens: Tokens) -> None:
        """Pin the blocks of a prefix."""
        self._keep(prefix, tokens, pin=prefix.key)

    def _keep(self, prefix: Prefix, tokens: Tokens, *, pin: str) -> int:
        base, adapter_id = self._names(prefix)
        return self._prefixes.keep(
            base,
            adapter_id,
            tokens,
            prefix.retention,
            block_class=prefix.block_class,
            pin=pin,
        )

    async def has_room(self, prefix: Prefix, tokens: int) -> bool:
        """Whether so many more tokens fit without an eviction."""
        facts = await facts_at_hand(self._models.get(prefix.model_id, prefix.client))
        if isinstance(facts, WarmReport):
            return False
        return self._prefixes.bytes_of(facts, tokens) <= self._prefixes.free_bytes()

    async def warm(self, prefix: Prefix, tokens: Tokens) -> Warmed | WarmReport:
        """Have the engine compute the missing blocks.

        Raises the errors of a decode. The work counts to no client's share.
        """
        token_ids, cuts = unmarked(tokens)
        request = DecodeRequest(
            token_ids=token_ids,
            max_tokens=0,
            priority=GenerationPriority.SPECULATIVE,
            cuts=cuts,
            kv_retention=prefix.retention,
            kv_holder=prefix.kv_holder,
        )
        model = self._models.get(prefix.model_id, prefix.client)
        if isinstance(facts := await facts_at_hand(model), WarmReport):
            return facts
        if not await self._prefixes.has_name(facts):
            reason = f"the weights of {facts.model_id} are still read for the name of their KV"
            return WarmReport(outcome=WarmOutcome.AWAY, reason=reason)
        async with aclosing(model.decode(request)) as frames:
            async for frame in frames:
                if isinstance(frame, Done):
                    cached = min(frame.usage.cached_tokens, len(tokens) - 1)
                    computed = len(tokens) - 1 - cached
                    return Warmed(tokens=len(tokens), cached=cached, computed=computed)
                if self._is_needed():
                    return _GIVES_WAY
        raise InvariantBroken("stream", "a decode ended without its done frame")

    def unpin(self, key: str) -> None:
        """End the pin of a key."""
        self._prefixes.release(key)

    def _names(self, prefix: Prefix) -> tuple[str, str]:
        """The base and the adapter of a model as its engine knows them."""
        if any(model.model_id == prefix.model_id for model in self._models.verifiers()):
            return prefix.model_id, ""
        try:
            record = self._adapter(prefix.model_id, prefix.client)
        except (NotFound, Denied):  # removed meanwhile: nothing of it is there
            return prefix.model_id, ""
        return record.base, record.version


_GIVES_WAY = WarmReport(outcome=WarmOutcome.PRESSURE, reason="a model waits for room in memory")
