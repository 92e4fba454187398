"""Turns of requests that want the same pieces: the decisions of `Flights`, carried out.

`Turns` are a node's; a `Turn` is one request's part in them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from kakeya.core.clock import Clock
from kakeya.prefix.names.blocks import BlockId
from kakeya.prefix.names.naming import Naming
from kakeya.prefix.names.pieces import Piece
from kakeya.prefix.pages.counts import PrefixCounts
from kakeya.prefix.pages.pages import PrefixPages
from kakeya.prefix.pages.reach import missing_of
from kakeya.prefix.request.flights import Flights, Lead, PrefixFlight, patience_for


class Turns:
    """The state that all turns of a node share. Lives on the event loop."""

    def __init__(self, pages: PrefixPages, *, clock: Clock, counts: PrefixCounts) -> None:
        self.flights = Flights()
        self.pages = pages
        self.clock = clock
        self.counts = counts
        self.waiting = 0
        self._changed = asyncio.Event()
        self._turns: dict[PrefixFlight, Turn] = {}

    def stir(self) -> None:
        """Have all waiting turns look again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def landed(self, block_id: BlockId) -> None:
        """Note that a piece is in pages."""
        self.flights.landed(block_id, self.clock.mono())
        self.stir()

    def join(self, turn: Turn, naming: Naming) -> PrefixFlight:
        """Begin the flight of a turn."""
        flight = self.flights.join(
            turn.lane,
            naming.seed,
            urgency=turn.urgency,
            can_yield=turn.can_yield,
            now=self.clock.mono(),
        )
        self._turns[flight] = turn
        return flight

    def leave(self, flight: PrefixFlight) -> None:
        """End a flight."""
        self.flights.leave(flight)
        self._turns.pop(flight, None)
        self.stir()

    def supersede(self, flights: Iterable[PrefixFlight]) -> None:
        """Tell turns that a more urgent request took over."""
        for flight in flights:
            self._turns[flight].superseded.set()

    async def wait(self, until_mono: float) -> None:
        """Wait for a change, or until a time."""
        changed, began_mono = self._changed, self.clock.mono()
        self.waiting += 1
        try:
            await self.clock.sleep(max(0.0, until_mono - began_mono), changed)
        finally:
            self.waiting -= 1
            self.counts.waited_s += self.clock.mono() - began_mono


class Turn:
    """One request. `lane` names its engine."""

    def __init__(self, turns: Turns, lane: str, *, urgency: int, can_yield: bool) -> None:
        self.lane = lane
        self.urgency = urgency
        self.can_yield = can_yield
        self.superseded = asyncio.Event()
        self.pieces: tuple[Piece, ...] = ()
        """The pieces of its history, in order."""
        self._turns = turns
        self._flight: PrefixFlight | None = None
        self._taken: tuple[bytes, int] = (b"", 0)
        self._has_waited = False

    async def stand(
        self,
        naming: Naming,
        token_ids: Sequence[int],
        cuts: Sequence[int] = (),
        until_mono: float | None = None,
    ) -> None:
        """Claim the missing pieces of a history, or wait while another request computes them."""
        turns = self._turns
        self._take(naming, token_ids, cuts)
        flight = self._join(naming)
        shelf = turns.pages.shelf(naming)
        while True:
            now = turns.clock.mono()
            missing, shared = missing_of(shelf, self.pieces, naming)
            patience = patience_for(naming, missing[0].index if missing else 0)
            self.superseded.clear()
            standing = turns.flights.stand(flight, missing, shared, patience, now)
            if isinstance(standing, Lead):
                turns.supersede(standing.superseded)
                return
            if until_mono is not None and now >= until_mono:
                return
            turns.counts.waits += not self._has_waited
            self._has_waited = True
            turns.stir()  # it gave up what it had claimed
            until = standing.until_mono
            await turns.wait(until if until_mono is None else min(until, until_mono))

    @property
    def is_superseded(self) -> bool:
        """Whether a more urgent request computes the pieces of this one."""
        return self._flight is not None and self._flight.is_superseded

    def claimed(self) -> tuple[Piece, ...]:
        """The pieces that it is to compute, in order."""
        claims = self._flight.claims if self._flight is not None else {}
        return tuple(piece for piece in self.pieces if piece.id in claims)

    def asked(self) -> None:
        """Note that the engine has the request."""
        if self._flight is not None:
            self._turns.flights.asked(self._flight, self._turns.clock.mono())

    def heard(self) -> None:
        """Note a sign of life."""
        if self._flight is not None:
            self._turns.flights.heard(self._flight, self._turns.clock.mono())

    def give_up(self, block_ids: Iterable[BlockId] | None = None) -> None:
        """Give up these claims, or all."""
        flight = self._flight
        if flight is not None and flight.claims:
            given_up = tuple(flight.claims) if block_ids is None else tuple(block_ids)
            self._turns.flights.give_up(flight, given_up)
            self._turns.stir()

    def leave(self) -> None:
        """End the flight."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._turns.leave(flight)

    def _join(self, naming: Naming) -> PrefixFlight:
        if self._flight is not None and self._flight.seed != naming.seed:
            self.leave()
        if self._flight is None:
            self._flight = self._turns.join(self, naming)
        return self._flight

    def _take(self, naming: Naming, token_ids: Sequence[int], cuts: Sequence[int]) -> None:
        """Name the pieces of the history, once for each length of it: it only grows."""
        if self._taken != (naming.seed, len(token_ids)):
            self.pieces = naming.pieces(token_ids, cuts)
            self._taken = naming.seed, len(token_ids)
