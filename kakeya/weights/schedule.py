"""Which piece of a model is asked from which source next. Pure; `now` is in monotonic seconds.

    take        a piece that the source has: of the next ones in order the one that the fewest
                sources have, so that nodes that fetch at the same time have something to exchange
    late        where nothing else is left, a piece that another source is late with is asked for
                once more
    lost        a source that does not answer rests, twice as long each time, until it is seen
    wrong       a source that sends a wrong byte is left for good

A source gives pieces as fast as it asks for them, so a slow one just gets fewer.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

FIRST_REST_S, LONGEST_REST_S = 0.5, 16.0
LATE = 3.0
"""A piece is late after so many times what a piece takes at the source that is free."""
LATE_LEAST_S = 1.0
MOST_AT_ONCE = 2
"""Sources that are asked for one piece at the same time."""
_WINDOW = 64
"""Pieces of which the rarest is chosen: files are read and written about in order."""
_SMOOTHING = 0.3


@dataclass(slots=True)
class PieceSource:
    """What is known of one source. `held` None = it has all."""

    held: set[int] | None
    asked: dict[int, float] = field(default_factory=dict)
    """The pieces that it was asked for, and when."""
    lost: int = 0
    rests_until: float = 0.0
    piece_s: float = 0.0
    left: str = ""
    """Why it is asked for nothing any more; "" = it is."""

    def has(self, piece: int) -> bool:
        """Whether a piece is there."""
        return self.held is None or piece in self.held


class PieceSchedule:
    """The pieces that are missing, in order from a first one on, and the sources."""

    def __init__(self, pieces: int, have: Collection[int] = (), *, first: int = 0) -> None:
        """Nodes that begin at different pieces have more to exchange."""
        order = itertools.chain(range(first, pieces), range(first))
        self._missing = {piece: None for piece in order if piece not in have}
        """Neither here nor asked for."""
        self._asked: dict[int, set[str]] = {}
        self.sources: dict[str, PieceSource] = {}

    @property
    def is_done(self) -> bool:
        """Whether all pieces are here."""
        return not self._missing and not self._asked

    def join(self, name: str, held: Iterable[int] | None) -> None:
        """A source has these pieces, None = all; it may be known already."""
        has = None if held is None else set(held)
        source = self.sources.setdefault(name, PieceSource(has))
        source.held = has

    def back(self, name: str) -> None:
        """A source was seen again: it is not to rest any longer."""
        self.sources[name].rests_until = 0.0

    def why_left(self, name: str) -> str:
        """Why a source is asked for nothing any more; "" = it is."""
        return self.sources[name].left if name in self.sources else ""

    @property
    def giving(self) -> set[str]:
        """The sources of which nothing failed since their last piece."""
        return {name for name, one in self.sources.items() if not one.left and not one.lost}

    @property
    def usable(self) -> list[str]:
        """The sources that were not left."""
        return [name for name, source in self.sources.items() if not source.left]

    def take(self, name: str, now: float) -> int | None:
        """The piece to ask a source for now; None = none. It ends with `arrived` or `failed`."""
        source = self.sources[name]
        if source.left or now < source.rests_until:
            return None
        free = itertools.islice((one for one in self._missing if source.has(one)), _WINDOW)
        found = min(free, key=self._holders, default=None)
        if found is None:
            found = next(self._late(name, source, now), None)
        if found is None:
            return None
        self._missing.pop(found, None)
        self._asked.setdefault(found, set()).add(name)
        source.asked[found] = now
        return found

    def arrived(self, name: str, piece: int, now: float) -> None:
        """A piece is here, whole and right."""
        source = self.sources[name]
        took = now - source.asked.pop(piece, now)
        known = source.piece_s
        source.piece_s = known + _SMOOTHING * (took - known) if known else took
        source.lost = 0
        self._asked.pop(piece, None)
        self._missing.pop(piece, None)

    def failed(self, name: str, piece: int, now: float, *, wrong: str = "") -> None:
        """A piece did not come from a source; `wrong` tells of bytes that are not those of the
        piece."""
        source = self.sources[name]
        source.asked.pop(piece, None)
        askers = self._asked.get(piece, set())
        if name in askers:
            askers.discard(name)
            if not askers:
                del self._asked[piece]
                self._missing = {piece: None, **self._missing}
        if wrong:
            source.left = wrong
            return
        source.lost += 1
        rest_s = min(FIRST_REST_S * 2 ** min(source.lost - 1, 10), LONGEST_REST_S)
        source.rests_until = now + rest_s

    def again(self, pieces: Iterable[int]) -> None:
        """Pieces that were here are lost, on a damaged disk."""
        self._missing |= dict.fromkeys(piece for piece in pieces if piece not in self._asked)

    def _holders(self, piece: int) -> int:
        return sum(source.has(piece) for source in self.sources.values() if not source.left)

    def _late(self, name: str, source: PieceSource, now: float) -> Iterator[int]:
        """Pieces that other sources are late with, and that this one has."""
        patience_s = max(LATE_LEAST_S, LATE * source.piece_s)
        for piece, askers in self._asked.items():
            if name in askers or len(askers) >= MOST_AT_ONCE or not source.has(piece):
                continue
            began = min(self.sources[one].asked[piece] for one in askers)
            if now - began >= patience_s:
                yield piece


@dataclass(slots=True)
class RateBound:
    """A bound in bytes/s, 0 = none: what is fetched waits for its turn."""

    bytes_per_s: float
    free_mono: float = 0.0
    """Until then what has its turn is fetched."""

    def turn(self, size: int, now: float) -> float:
        """Take so many bytes; the seconds to wait before they are fetched."""
        if not self.bytes_per_s:
            return 0.0
        begins = max(now, self.free_mono)
        self.free_mono = begins + size / self.bytes_per_s
        return begins - now
