"""News of peers for the log: one line when a peer appears, leaves, falls silent, answers again."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kakeya.core.clock import Clock
from kakeya.core.ids import NodeId
from kakeya.core.log import event
from kakeya.fleet.cards.cards import Card
from kakeya.fleet.cards.names import short_id
from kakeya.fleet.view.registry import CapabilityRegistry
from kakeya.fleet.view.suspicion import Doubt

_log = logging.getLogger(__name__)
GATHER_S = 0.5
"""How long further changes are gathered after one."""
UNJUDGED_S = 5.0
"""A doubt that no helper judged is told once it has lasted so long: most end with the next call."""
APPEARED, LEFT, GONE = "a peer appeared", "a peer left", "a peer is gone"
SILENT, BACK = "a peer does not answer", "a peer answers again"
NEWS = {APPEARED: "appeared", LEFT: "left", GONE: "gone", SILENT: "silent", BACK: "back"}
"""All that can happen to a peer, as the log says it and as figures do."""
_REASONS = {
    Doubt.FLEET_WIDE: "no other node reaches it either",
    Doubt.ASYMMETRIC: "other nodes reach it",
}


@dataclass(frozen=True, slots=True)
class SeenPeer:
    """A peer at one moment. `doubt` None = it answers; `is_hearsay` = only relays told of it."""

    card: Card
    doubt: Doubt | None = None
    is_hearsay: bool = False


@dataclass(slots=True)
class _Told:
    card: Card
    doubted_mono: float | None = None
    is_silent: bool = False


class PeerChanges:
    """What of a view is news; pure, the caller gives the time."""

    def __init__(self) -> None:
        self._told: dict[NodeId, _Told] = {}

    @property
    def is_unsettled(self) -> bool:
        """Whether a doubt is too young to be told."""
        return any(
            one.doubted_mono is not None and not one.is_silent for one in self._told.values()
        )

    def look(self, peers: Sequence[SeenPeer], mono: float) -> Iterator[tuple[str, Card]]:
        """Yield what happened to a peer since the last look, with its card, each once."""
        seen = {peer.card.node_id: peer for peer in peers if not peer.card.is_leaving}
        leaving = {peer.card.node_id for peer in peers if peer.card.is_leaving}
        for node_id in self._told.keys() - seen.keys():
            left = node_id in leaving
            yield LEFT if left else GONE, self._told.pop(node_id).card
        for node_id, peer in seen.items():
            if node_id in self._told:
                told = self._told[node_id]
                told.card = peer.card
                if news := _turn(told, peer.doubt, mono):
                    yield news, peer.card
            elif peer.doubt is None and not peer.is_hearsay:
                self._told[node_id] = _Told(peer.card)
                yield APPEARED, peer.card


def _turn(told: _Told, doubt: Doubt | None, mono: float) -> str:
    """What a doubt, or its end, is to a peer that was told of; "" = no news."""
    if doubt is None:
        was_silent, told.is_silent, told.doubted_mono = told.is_silent, False, None
        return BACK if was_silent else ""
    if told.doubted_mono is None:
        told.doubted_mono = mono
    if told.is_silent or (doubt is Doubt.UNJUDGED and mono - told.doubted_mono < UNJUDGED_S):
        return ""
    told.is_silent = True
    return SILENT


class PeerNews:
    """Writes the news of a registry's peers to the log."""

    def __init__(self, registry: CapabilityRegistry, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock
        self._changes = PeerChanges()
        self.counts: Counter[str] = Counter()
        """By the words of `NEWS`."""
        self._wake = asyncio.Event()
        self._wake.set()
        registry.subscribe(self._wake.set)

    async def run(self) -> None:
        """Tell news as they come, without end."""
        while True:
            await self._wake.wait()
            await self._clock.sleep(GATHER_S)
            self._wake.clear()
            for news, card in self._changes.look(self._peers(), self._clock.mono()):
                self._tell(news, card)
            if self._changes.is_unsettled:
                await self._clock.sleep(UNJUDGED_S, self._wake)
                self._wake.set()

    def _peers(self) -> list[SeenPeer]:
        doubts, suspects = self._registry.suspicions, self._registry.suspects()
        return [
            SeenPeer(card, doubt, is_hearsay=doubt is None and card.node_id in suspects)
            for card in self._registry.snapshot(mono=self._clock.mono())[1:]
            for doubt in (doubts.doubt_of(card.grpc_address),)
        ]

    def _tell(self, news: str, card: Card) -> None:
        self.counts[NEWS[news]] += 1
        reason = ""
        if news == SILENT and (doubt := self._registry.suspicions.doubt_of(card.grpc_address)):
            reason = _REASONS.get(doubt, "")
        event(
            _log,
            news,
            level=logging.WARNING if news == SILENT else logging.INFO,
            peer=card.label or card.node_id,
            node_id=short_id(card.node_id),
            address=card.grpc_address,
            **({"reason": reason} if reason else {}),
        )
