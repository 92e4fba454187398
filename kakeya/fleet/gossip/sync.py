"""Gossip without I/O: the messages of one node to another, and their effects on its view.

    digest   caller: key and beat of every held card    -> callee: later beats, bodies that the
             caller did not name, keys that it wants    -> caller pushes the wanted bodies
    full     both: every card, with its beat beside it; for nodes that know no digests, and now and
             then for all, so that no fault of the digests lasts

The shells (`round.py`, `service.py`, a simulation) move the bytes and give the time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kakeya.core.ids import NodeId
from kakeya.core.units import KIB, MIB
from kakeya.fleet.cards.cards import MAX_AHEAD_S, Card
from kakeya.fleet.cards.convert import CardBatch, join_batch, scan_cards, split_batch
from kakeya.fleet.gossip.messages import (
    MAX_WANTED,
    BatchAnswer,
    Digest,
    Parcel,
    decode_answer,
    decode_beats,
    decode_digest,
    decode_parcel,
    encode_answer,
    encode_beats,
    encode_digest,
    encode_parcel,
)
from kakeya.fleet.gossip.targets import fit_batch
from kakeya.fleet.view.beats import Beats, Keys
from kakeya.fleet.view.digest import (
    MANY_UNKNOWN,
    MIN_SIGNED_BYTES,
    all_beats,
    beats_of,
    cards_of,
    likely_new,
    news,
    unknown,
    verification,
)
from kakeya.fleet.view.registry import CapabilityRegistry, MergeReport
from kakeya.fleet.view.skew import Skews
from kakeya.fleet.view.slices import Slices, finish
from kakeya.fleet.view.suspicion import Accusations, Sign

MAX_CARDS_BYTES = 3 * MIB // 2
MAX_REPAIR_BYTES = 128 * KIB
"""Bytes of cards in a full exchange between nodes that know digests. Digests carry all news, so a
full exchange only repairs their omissions, in a large fleet by a draw of some hundred cards."""
"""Bytes of bodies in one answer or push; the beats of 10,000 cards need the rest of 2 MiB."""
MIN_TOLD = 64
"""Least count of beats with age and proof in a digest. Of more, the earliest third is only named: a
peer answers with later beats of most of those, and proofs are half of a digest's bytes."""


class RevocationSource(Protocol):
    """The signed list of nodes that the fleet revoked."""

    @property
    def revocations(self) -> tuple[int, bytes]:
        """Version and signed list; (0, b"") = none yet."""
        ...

    def apply_revocations(self, blob: bytes) -> bool:
        """Take a list if it is the authority's and newer; returns whether it was taken."""
        ...


class _NoRevocations:
    revocations = (0, b"")

    def apply_revocations(self, blob: bytes) -> bool:
        return False


class _NoAccusations:
    def outgoing(self) -> tuple[Sign, ...]:
        return ()

    def hear(self, accusations: Sequence[Sign], accuser: str = "") -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The answer to a request, and the request's effect on the view."""

    response: bytes
    report: MergeReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """An answer's effect on the view; `push` is to be sent back, if it is not None."""

    report: MergeReport
    push: bytes | None = None
    cards_received: int = 0


class Sync:
    """One node's side of gossip, over its registry."""

    def __init__(
        self,
        registry: CapabilityRegistry,
        *,
        rng: random.Random,
        revocations: RevocationSource | None = None,
        suspicion: Accusations | None = None,
    ) -> None:
        self._registry = registry
        self._rng = rng
        self._revocations = revocations or _NoRevocations()
        self._suspicion: Accusations = suspicion or _NoAccusations()
        self._skews = Skews()
        self._split_ahead: tuple[bytes, CardBatch] | None = None
        """A full exchange that was split for `verification`, to be taken next."""

    @property
    def skews(self) -> Skews:
        """Offsets of the peers' clocks."""
        return self._skews

    # --- by digest

    def request(self, *, now: float, mono: float) -> bytes:
        """Begin an exchange: a SyncRequest, the same for every peer of a round."""
        self._registry.beat(now=now, mono=mono)
        return encode_digest(
            Digest(
                held=all_beats(self._registry, mono=mono, least=MIN_TOLD),
                accusations=self._suspicion.outgoing(),
                revocations_version=self._revocations.revocations[0],
                sent_at=now,
            )
        )

    def answer(self, request: bytes, *, now: float, mono: float, peer: str = "") -> Answered:
        """Take the beats of a SyncRequest, and answer it. Raises InvalidArgument, Refused.

        Here and below `peer` is the node id in the certificate of the connection; "" = none.
        """
        digest = decode_digest(request)
        registry = self._registry
        report = MergeReport(beaten=registry.hear(digest.held, now=now, mono=mono))
        if peer:
            registry.meet(peer)
        self._note_skew(digest.held, digest.sent_at, peer, now=now, mono=mono, rtt_s=0.0)
        self._hear_accusations(digest.accusations, peer, now=now, mono=mono)
        registry.beat(now=now, mono=mono)
        places = registry.peers.held.places(digest.held.keys)
        newer, unnamed = news(registry, digest.held, places, mono=mono)
        wanted = unknown(registry, digest.held, places, mono=mono)[:MAX_WANTED]
        bodies = likely_new(registry, unnamed, unread=_of_others(wanted, digest.held), mono=mono)
        version, blob = self._revocations.revocations
        response = BatchAnswer(
            newer=newer,
            cards=self._fit(bodies),
            wanted=wanted,
            accusations=self._suspicion.outgoing(),
            revocations_version=version,
            revocations=blob if version > digest.revocations_version else b"",
            sent_at=now,
        )
        return Answered(response=encode_answer(response), report=report)

    def answering(
        self, request: bytes, *, now: float, mono: float, peer: str = ""
    ) -> Slices[Answered]:
        """`answer` for callers that take all answers in slices; it needs only one."""
        yield from ()
        return self.answer(request, now=now, mono=mono, peer=peer)

    def accept(
        self, response: bytes, *, now: float, mono: float, rtt_s: float = 0.0, peer: str = ""
    ) -> Accepted:
        """Take a SyncResponse. Raises InvalidArgument, Refused."""
        return finish(self.accepting(response, now=now, mono=mono, rtt_s=rtt_s, peer=peer))

    def accepting(
        self, response: bytes, *, now: float, mono: float, rtt_s: float = 0.0, peer: str = ""
    ) -> Slices[Accepted]:
        """`accept` in slices."""
        answer = decode_answer(response)
        report = yield from self._merge(answer.cards, answer.newer, peer, now=now, mono=mono)
        self._note_skew(answer.newer, answer.sent_at, peer, now=now, mono=mono, rtt_s=rtt_s)
        self._hear_accusations(answer.accusations, peer, now=now, mono=mono)
        self._apply(answer.revocations, now=now, mono=mono)
        return Accepted(
            report=report,
            push=self._push(answer, mono=mono),
            cards_received=len(answer.cards),
        )

    def take(self, push: bytes, *, now: float, mono: float, peer: str = "") -> MergeReport:
        """Take a PushRequest. Raises InvalidArgument, Refused."""
        return finish(self.taking(push, now=now, mono=mono, peer=peer)).report

    def taking(self, push: bytes, *, now: float, mono: float, peer: str = "") -> Slices[Answered]:
        """`take` in slices; the answer is empty."""
        parcel = decode_parcel(push)
        report = yield from self._merge(parcel.cards, parcel.beats, peer, now=now, mono=mono)
        self._apply(parcel.revocations, now=now, mono=mono)
        return Answered(response=b"", report=report)

    def farewell(self, *, now: float, mono: float) -> bytes:
        """Make the last body; a PushRequest of it, for every live peer."""
        card = self._registry.farewell(now=now, mono=mono)
        beats = beats_of(self._registry, [], mono=mono)
        return encode_parcel(Parcel(beats=beats, cards=[card.wire], is_farewell=True))

    # --- in full

    def batch(self, *, now: float, mono: float, max_bytes: int = MAX_CARDS_BYTES) -> bytes:
        """All cards that fit: an ExchangeCapabilitiesRequest, or the answer to one."""
        registry = self._registry
        registry.beat(now=now, mono=mono)
        others = {card.wire: card for card in registry.peers.held.lively(mono)}
        wires = fit_batch([registry.own.wire, *others], max_bytes, self._rng)
        beats = beats_of(registry, [others[wire] for wire in wires[1:]], mono=mono)
        return join_batch(wires, encode_beats(beats), now)

    def taking_batch(
        self, message: bytes, *, now: float, mono: float, rtt_s: float = 0.0, peer: str = ""
    ) -> Slices[Accepted]:
        """Take a full exchange, asked or answered, in slices. Raises InvalidArgument, Refused."""
        batch = self._split(message)
        report = yield from self._take_whole(batch, peer, now=now, mono=mono, rtt_s=rtt_s)
        return Accepted(report=report, cards_received=len(batch.cards))

    def answering_batch(
        self, request: bytes, *, now: float, mono: float, peer: str = ""
    ) -> Slices[Answered]:
        """Take a full exchange and answer with all cards, in slices. Raises InvalidArgument,
        Refused."""
        batch = self._split(request)
        report = yield from self._take_whole(batch, peer, now=now, mono=mono, rtt_s=0.0)
        max_bytes = MAX_REPAIR_BYTES
        if not batch.beats:  # the caller judges by stamps, and hears of the others only so
            self._registry.refresh(now=now, mono=mono)
            max_bytes = MAX_CARDS_BYTES
        response = self.batch(now=now, mono=mono, max_bytes=max_bytes)
        return Answered(response=response, report=report)

    def verification(self, message: bytes, field: int) -> Callable[[], None] | None:
        """Work to be done in a thread before a message with many unknown cards is taken.

        `field` is the one of the cards: 1 of a full exchange, 2 of an answer and of a push.
        """
        trust = self._registry.trust
        if trust is None or len(message) < MANY_UNKNOWN * MIN_SIGNED_BYTES:
            return None
        if field == 1:
            self._split_ahead = (message, batch := split_batch(message))
            return verification(self._registry, trust, batch.cards)
        return verification(self._registry, trust, scan_cards(message, field))

    # --- parts

    def _split(self, message: bytes) -> CardBatch:
        """Split a full exchange, unless that was done ahead."""
        ahead, self._split_ahead = self._split_ahead, None
        return ahead[1] if ahead is not None and ahead[0] is message else split_batch(message)

    def _take_whole(
        self, batch: CardBatch, peer: str, *, now: float, mono: float, rtt_s: float
    ) -> Slices[MergeReport]:
        beats = decode_beats(batch.beats)
        report = yield from self._merge(batch.cards, beats, peer, now=now, mono=mono)
        self._note_skew(beats, batch.sent_at, peer, now=now, mono=mono, rtt_s=rtt_s)
        return report

    def _merge(
        self, wires: Sequence[bytes], beats: Beats, peer: str, *, now: float, mono: float
    ) -> Slices[MergeReport]:
        report = yield from self._registry.merging(wires, beats, now=now, mono=mono)
        if peer:
            self._registry.meet(peer)
        return report

    def _push(self, answer: BatchAnswer, *, mono: float) -> bytes | None:
        version, blob = self._revocations.revocations
        owed = blob if version > answer.revocations_version else b""
        cards = cards_of(self._registry, answer.wanted)
        if not cards and not owed:
            return None
        wires = self._fit(cards)
        kept = set(wires)
        others = [c for c in cards if c.wire in kept and c is not self._registry.own]
        beats = beats_of(self._registry, others, mono=mono)
        return encode_parcel(Parcel(beats=beats, cards=wires, revocations=owed))

    def _fit(self, cards: Sequence[Card]) -> list[bytes]:
        wires = [card.wire for card in cards]
        return fit_batch(wires, MAX_CARDS_BYTES, self._rng) if wires else wires

    def _note_skew(
        self, beats: Beats, sent_at: float, peer: str, *, now: float, mono: float, rtt_s: float
    ) -> None:
        if 0.0 < sent_at < self._registry.own_card.stamped_at - MAX_AHEAD_S:
            # The own clock was ahead and is repaired, so the own stamps are ahead of the fleet's.
            self._registry.accept_refusal(now=now, mono=mono)
        if not peer and self._registry.trust is None:
            # The own card comes first, but a liar can put another node's card there.
            peer = next((card.node_id for card in cards_of(self._registry, beats.keys[:1])), "")
        if peer:
            self._skews.note(NodeId(peer), sent_at=sent_at, now=now, rtt_s=rtt_s, mono=mono)

    def _hear_accusations(
        self, signs: tuple[Sign, ...], peer: str, *, now: float, mono: float
    ) -> None:
        is_accused = self._registry.is_accused(signs)
        if signs:
            # Before the beat, since after it the accusation looks refuted.
            self._suspicion.hear(signs, peer)
        if is_accused:
            self._registry.own_card.defend(now=now, mono=mono)

    def _apply(self, revocations: bytes, *, now: float, mono: float) -> None:
        if revocations and self._revocations.apply_revocations(revocations):
            self._registry.recheck(now, mono=mono)


def _of_others(wanted: Keys, theirs: Beats) -> int:
    """Count the wanted keys without the caller's own, which comes first in `theirs`.

    A caller that is new here has a card that is unknown and outdates none.
    """
    return len(wanted) - int(np.isin(theirs.keys[:1], wanted).sum())
