"""Which request computes which piece of KV, and which requests wait: no piece is computed twice.

A flight is one request on its way: to its engine, or waiting. It stands at the first piece of its
history that is not here:

    no request computes it         lead: claim it, and all unclaimed pieces behind it
    a leader computes it           wait until it is there, or until its leader stalls
    its leader has stalled         lead in its place; the first block to be done is taken
    its leader is less urgent      lead in its place, if it is not to decode: it is superseded,
                                   stops, and comes back to wait like others
                                   otherwise wait as long as it is brisk: with an engine at rest
                                   that is sooner than beginning anew, with a busy one it is not

A piece of another text that begins like the wanted one is waited for too, if more of it can be
taken than is here: the part of a prompt behind its last whole block is not computed twice either.

Law: a waiting flight claims nothing. So a leader never waits, and no two flights wait for each
other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kakeya.core.errors import InvariantBroken
from kakeya.generation.cuts import usable
from kakeya.prefix.names.blocks import BlockId, shared_tokens
from kakeya.prefix.names.naming import Naming
from kakeya.prefix.names.pieces import Piece

UNASKED_S = 120.0
"""How long a leader may take to reach its engine: it waits for a place, or for the model."""
_SILENT_FACTOR = 4
"""A leader without a sign of its own is given up after so many times the patience, though its
engine works: its client may not read the answers."""


@dataclass(slots=True, eq=False, kw_only=True)
class PrefixFlight:
    """One request. `lane` names its engine, `seed` begins its ids; a smaller `urgency` goes first;
    `can_yield`: it is not to decode anything, so it loses nothing when interrupted."""

    lane: str
    seed: bytes
    urgency: int
    can_yield: bool
    heard_mono: float
    is_asked: bool = False
    is_superseded: bool = False
    claims: dict[BlockId, Piece] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds that a leader may be silent: one as urgent as the flight, and a less urgent one.

    `least_shared` tokens at the very beginning of two texts are worth waiting for. Of a block that
    is shared in part, engines take the tokens up to a cut, or to a multiple of `grain`.
    """

    fair_s: float
    brisk_s: float
    least_shared: int
    grain: int = 1


@dataclass(frozen=True, slots=True)
class Lead:
    """Compute the missing pieces; the flight owns `claimed`. `superseded` are to be interrupted."""

    claimed: tuple[Piece, ...]
    superseded: tuple[PrefixFlight, ...] = ()


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Look again after each change, and at `until_mono` at the latest."""

    leader: PrefixFlight
    until_mono: float


Standing: TypeAlias = Lead | WaitUntil


class Flights:
    """All flights of a node. Pure: callers tell it the time and the events."""

    def __init__(self) -> None:
        self._flights: set[PrefixFlight] = set()
        self._leaders: dict[BlockId, PrefixFlight] = {}
        self._children: dict[BlockId | None, dict[BlockId, Piece]] = {}
        self._lanes: dict[str, float] = {}
        self.takeovers = 0
        self.supersedings = 0

    def __len__(self) -> int:
        return len(self._flights)

    def check_integrity(self) -> None:
        """Check that each claim is of one flight that is under way. Raises InvariantBroken."""
        claims = [(one, flight) for flight in self._flights for one in flight.claims]
        if dict(claims) != self._leaders or len(claims) != len(self._leaders):
            raise InvariantBroken(
                "claims", f"{len(claims)} of {len(self)} flights, {len(self._leaders)} known"
            )
        children = {one for siblings in self._children.values() for one in siblings}
        if children != set(self._leaders):
            raise InvariantBroken("claims", f"{len(children)} have a parent of {len(claims)}")

    def join(
        self, lane: str, seed: bytes, *, urgency: int, can_yield: bool, now: float
    ) -> PrefixFlight:
        """Begin a flight."""
        flight = PrefixFlight(
            lane=lane, seed=seed, urgency=urgency, can_yield=can_yield, heard_mono=now
        )
        self._flights.add(flight)
        return flight

    def leave(self, flight: PrefixFlight) -> None:
        """End a flight, which frees its claims; harmless twice."""
        self._flights.discard(flight)
        self._unclaim(flight, tuple(flight.claims))

    def leader(self, block_id: BlockId) -> PrefixFlight | None:
        """The flight that computes a piece now."""
        return self._leaders.get(block_id)

    def stand(
        self,
        flight: PrefixFlight,
        missing: Sequence[Piece],
        shared_here: int,
        patience: Patience,
        now: float,
    ) -> Standing:
        """Decide how a flight gets the pieces that are not here, in order; claims, or gives claims
        up.

        `shared_here` tokens of the first of them are here as the beginning of another piece.
        """
        flight.is_superseded = False
        flight.heard_mono = now
        if not missing:
            return Lead(())
        rival, shared = self._rival(flight, missing[0], patience.grain)
        gives_way = False
        if rival is not None and shared > shared_here:
            is_whole = shared == missing[0].count
            gives_way = _gives_way(rival, flight)
            is_beginning = missing[0].parent is None
            is_worth = is_whole or not is_beginning or shared >= patience.least_shared
            if not gives_way and is_worth:
                until = self._until(rival, flight, patience)
                if until > now:
                    self._unclaim(flight, tuple(flight.claims))
                    return WaitUntil(rival, until)
                self.takeovers += is_whole
        return self._lead(flight, missing, rival)

    def asked(self, flight: PrefixFlight, now: float) -> None:
        """Note that its engine has it."""
        flight.is_asked = True
        self.heard(flight, now)

    def heard(self, flight: PrefixFlight, now: float) -> None:
        """Note a sign of life."""
        flight.heard_mono = now
        self._lanes[flight.lane] = now

    def landed(self, block_id: BlockId, now: float) -> None:
        """Note that a piece is here."""
        leader = self._leaders.get(block_id)
        if leader is not None:
            self.heard(leader, now)
            self._unclaim(leader, (block_id,))

    def give_up(self, flight: PrefixFlight, block_ids: Iterable[BlockId]) -> None:
        """Take claims back: there are no pages for these, or the engine did not fill them."""
        self._unclaim(flight, [one for one in block_ids if one in flight.claims])

    def _lead(
        self, flight: PrefixFlight, missing: Sequence[Piece], rival: PrefixFlight | None
    ) -> Lead:
        """Claim the pieces that are free, those of the rival in this history, and those that
        yield."""
        superseded: list[PrefixFlight] = []
        for piece in missing:
            leader = self._leaders.get(piece.id)
            if leader is flight:
                continue
            if leader is not None:
                if _gives_way(leader, flight):
                    superseded.append(leader)
                    self.supersedings += 1
                    leader.is_superseded = True
                    self._unclaim(leader, tuple(leader.claims))
                elif leader is rival:
                    self._unclaim(leader, (piece.id,))
                else:
                    continue
            self._claim(flight, piece)
        mine = tuple(piece for piece in missing if piece.id in flight.claims)
        return Lead(mine, tuple(superseded))

    def _rival(
        self, flight: PrefixFlight, piece: Piece, grain: int
    ) -> tuple[PrefixFlight | None, int]:
        """The flight that brings most of a piece, and how many tokens of it."""
        leader = self._leaders.get(piece.id)
        if leader is not None:
            return (None, 0) if leader is flight else (leader, piece.count)
        best, most = None, 0
        for block_id, other in self._children.get(piece.parent, {}).items():
            leader = self._leaders[block_id]
            # Texts for different models begin alike too, but share no KV.
            if leader is flight or leader.seed != flight.seed:
                continue
            alike = shared_tokens(other.packed, piece.packed)
            shared = usable(piece.packed, other.packed, alike, grain)
            if shared > most:
                best, most = leader, shared
        return best, most

    def _until(self, rival: PrefixFlight, flight: PrefixFlight, patience: Patience) -> float:
        if not rival.is_asked:
            return rival.heard_mono + UNASKED_S
        if rival.urgency > flight.urgency:
            return rival.heard_mono + patience.brisk_s
        lane_mono = max(rival.heard_mono, self._lanes.get(rival.lane, 0.0))
        return min(lane_mono + patience.fair_s, rival.heard_mono + _SILENT_FACTOR * patience.fair_s)

    def _claim(self, flight: PrefixFlight, piece: Piece) -> None:
        flight.claims[piece.id] = piece
        self._leaders[piece.id] = flight
        self._children.setdefault(piece.parent, {})[piece.id] = piece

    def _unclaim(self, flight: PrefixFlight, block_ids: Iterable[BlockId]) -> None:
        for block_id in block_ids:
            piece = flight.claims.pop(block_id)
            del self._leaders[block_id]
            siblings = self._children[piece.parent]
            del siblings[block_id]
            if not siblings:
                del self._children[piece.parent]


def _gives_way(leader: PrefixFlight, flight: PrefixFlight) -> bool:
    return leader.can_yield and leader.urgency > flight.urgency


def patience_for(naming: Naming, index: int) -> Patience:
    """How long the leader of a block may be without a sign, by the seconds to compute one."""
    block_s = naming.compute_s(naming.block_tokens)
    return Patience(
        fair_s=min(60.0, max(2.0, 16 * block_s)),
        brisk_s=min(10.0, 0.25 + 3 * block_s),
        least_shared=max(1, naming.block_tokens // 8),
        grain=naming.grain(index),
    )
