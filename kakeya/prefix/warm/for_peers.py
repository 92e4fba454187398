"""Prefixes that this node keeps warm for others of its fleet, which declare them.

A declaring node says so again and again; without a word for `LAPSE_S` it looks after a prefix no
more. The prefixes are warmed as own declared ones are: behind all requests, into free room only,
from KV of the declaring node where that comes sooner than it is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kakeya.core.clock import Clock
from kakeya.fleet.placement.keepers import Keeping
from kakeya.generation.kv import KvHolder
from kakeya.generation.retention import BlockClass
from kakeya.prefix.seam import Tokens, WarmOutcome, WarmReport
from kakeya.prefix.warm.declared import DeclaredPrompts
from kakeya.prefix.warm.prewarm import Prewarmer
from kakeya.prefix.warm.warming import Prefix

LAPSE_S = 300.0
MOST_KEPT = 256
"""Prefixes for others; beyond them a node is refused."""
FOR_PEERS = "conv:__for_peers__"
"""Begins the keys of these prefixes, and no other key."""
_UNDER_WAY = WarmReport(
    outcome=WarmOutcome.AWAY, reason="it is declared there too, and is not warm yet"
)
_CROWDED = WarmReport(
    outcome=WarmOutcome.CROWDED, reason=f"{MOST_KEPT} prefixes of others are kept here already"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPrefix:
    """A prefix that a node has others keep warm. `tokens` are marked with their cuts, () = they are
    known there; `holder` has their KV."""

    model_id: str
    digest: bytes
    tokens: Tokens = field(default=(), repr=False)
    holder: KvHolder


class PrefixesForPeers:
    """See the module; lives on the event loop."""

    def __init__(self, prewarmer: Prewarmer, declared: DeclaredPrompts, clock: Clock) -> None:
        self._prewarmer = prewarmer
        self._declared = declared
        self._clock = clock
        self._until: dict[bytes, float] = {}
        """By digest, until when a prefix is kept, in monotonic seconds."""

    def __len__(self) -> int:
        return len(self._until)

    def keeping(self, digest: bytes) -> Keeping:
        """The care for a prefix here."""
        if self._declared.key_of(digest):
            return Keeping.DECLARED
        self.lapse()
        return Keeping.KEPT if digest in self._until else Keeping.NOTHING

    async def keep(self, asked: PeerPrefix) -> WarmReport | None:
        """Keep a prefix warm from now on, if it can be warmed; the report of that. None = it is not
        known here, and was sent without tokens."""
        if key := self._declared.key_of(asked.digest):
            return await self._renewed(key) or _UNDER_WAY
        self.lapse()
        key = f"{FOR_PEERS}/{asked.digest.hex()}"
        report = await self._renewed(key) if asked.digest in self._until else None
        if report is None and asked.tokens:
            report = await self._begin(key, asked)
        if report is None:
            self._until.pop(asked.digest, None)
        elif report.outcome is WarmOutcome.WARM:
            self._until[asked.digest] = self._clock.mono() + LAPSE_S
        return report

    async def _begin(self, key: str, asked: PeerPrefix) -> WarmReport:
        if asked.digest not in self._until and len(self._until) >= MOST_KEPT:
            return _CROWDED
        # Before it is warm: where the call ends meanwhile it is warmed all the same, and lapses.
        self._until[asked.digest] = self._clock.mono() + LAPSE_S
        report = await self._warm(key, asked)
        if report.outcome is not WarmOutcome.WARM:
            self._until.pop(asked.digest, None)
        return report

    async def _warm(self, key: str, asked: PeerPrefix) -> WarmReport:
        tokens = asked.tokens

        async def known() -> Tokens:
            return tokens

        prefix = Prefix(
            key=key,
            model_id=asked.model_id,
            tokens=known,
            block_class=BlockClass.SYSTEM,
            is_kept=True,
            kv_holder=asked.holder,
        )
        return await self._prewarmer.ask(prefix)

    def lapse(self) -> None:
        """Look no more after prefixes of which nothing was heard for long."""
        now = self._clock.mono()
        for digest in [digest for digest, until in self._until.items() if until < now]:
            del self._until[digest]
            self._prewarmer.forget(f"{FOR_PEERS}/{digest.hex()}")

    def clear(self) -> None:
        """Forget all: the KV here was wiped."""
        self._until.clear()

    async def _renewed(self, key: str) -> WarmReport | None:
        renewal = self._prewarmer.renew(key)
        return None if renewal is None else await renewal
