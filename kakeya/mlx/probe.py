"""Speeds of a model, measured on the model itself while no request waits.

A slice is one timed forward, or a few plain steps: a request that comes waits for no more. Rounds
over all sizes follow each other, so that a neighbour that computes for a while disturbs one time of
each size, and not all times of one.

A time is believed only of a quiet machine:

    CPU time   on the CPU a forward keeps its threads busy: where the process got a smaller share of
               the processor than in its best forwards of that size, other processes had the rest
    repeats    a few of the fastest of a size agree: a neighbour that takes memory or clock, not
               processor time, is never equally loud. A virtual machine has a forward to itself now
               and then, so that one time in five may be faster, but not by much: where true times
               are rare, those of a busy machine agree, too
    order      a forward of more rows takes no less time

While not all sizes are believed, all are measured again after a pause, each time a longer one, and
the times of earlier rounds still count: the best of many agree sooner than those of a few.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from kakeya.mlx.findings import Speeds
from kakeya.mlx.loader import LoadedModel
from kakeya.mlx.numerics.grid import is_cpu
from kakeya.mlx.verifier import MlxVerifier

ROWS = (1, 2, 4, 8, 16)
PIECES = (16, 32, 64, 128, 256)
ROUNDS = 5
ATTEMPTS = 8
QUIET_S = 1.0
"""The node has been idle for so long when a slice begins: an agent's next request may come soon."""
FIRST_PAUSE_S = 10.0
SLICE_S = 0.6
"""A size that would take longer is not measured."""
BUSY_SHARE = 0.9
"""Less processor time than this share of the usual, and a forward was disturbed."""
AGREEING = 3
"""So many of the fastest times of a size must agree."""
SPREAD = 1.1
"""The slowest of them takes at most this many times the fastest, and a smaller size at most this
many times a larger one."""
LUCKY_IN = 5
"""One in so many times may be faster than those that agree."""
REACH = 1.15
"""Those that agree take at most this many times the fastest of all."""
_CONTEXT_TOKENS = 64
_DEEP_TOKENS = 1024
"""Attention slows prefill with the length of the context: it is timed once more behind so many."""
_PLAIN_STEPS_S = 0.3
_MOST_STEPS = 8


class Timing(NamedTuple):
    """The time that passed, and the processor time of the whole process meanwhile."""

    wall_s: float
    cpu_s: float


_Timings: TypeAlias = dict[int, list[Timing]]
"""By size, in the order of the rounds."""


def believed_s(timings: Sequence[Timing], *, on_cpu: bool) -> float | None:
    """The time of a piece of work on a quiet machine; None = it is not known by these timings."""
    # The second best: one forward may have fallen together with work of another thread.
    shares = sorted(each.cpu_s / each.wall_s for each in timings)
    usual = shares[-2] if len(shares) > 1 else 0.0
    quiet = sorted(
        each.wall_s
        for each in timings
        if not on_cpu or each.cpu_s >= BUSY_SHARE * max(1.0, usual) * each.wall_s
    )
    for lucky in range(len(quiet) // LUCKY_IN + 1):
        best = quiet[lucky : lucky + AGREEING]
        if len(best) < AGREEING or best[-1] > REACH * quiet[0]:
            return None
        if best[-1] <= SPREAD * best[0]:
            return best[AGREEING // 2]
    return None


def believed_sizes(timings: Mapping[int, Sequence[Timing]], *, on_cpu: bool) -> dict[int, float]:
    """The times of all sizes; {} = some are not known, or a larger size seems the faster one."""
    found: dict[int, float] = {}
    for size in sorted(timings):
        seconds = believed_s(timings[size], on_cpu=on_cpu)
        if seconds is None:
            return {}
        found[size] = seconds
    is_ordered = all(small <= SPREAD * large for small, large in pairwise(found.values()))
    return found if is_ordered else {}


class SpeedProbe:
    """Measures what is not `known` of one model; `speeds` are those that are believed so far.
    `has_room` says whether so many more bytes may be taken."""

    def __init__(
        self,
        loaded: LoadedModel,
        vocab_size: int,
        *,
        opened: Callable[[], MlxVerifier] | None = None,
        known: Speeds = Speeds(),  # noqa: B008 - frozen
        has_room: Callable[[int], bool] = lambda _: True,
        clock: Callable[[], Timing] = lambda: Timing(time.perf_counter(), time.process_time()),
    ) -> None:
        self.speeds = known
        self._loaded = loaded
        self._opened = opened or (lambda: MlxVerifier(loaded))
        self._vocab_size = vocab_size
        self._has_room = has_room
        self._clock = clock
        self._on_cpu = is_cpu()
        self._forward_timings: _Timings = {}
        self._piece_timings: _Timings = {}

    def slices(self) -> Iterator[float]:
        """Measure, a slice for each `next`; yields how long the node must have been idle for it."""
        pause_s = FIRST_PAUSE_S
        for _ in range(ATTEMPTS):
            if not self.speeds.forwards_s:
                yield from self._forwards()
            if not self.speeds.pieces_s:
                yield from self._pieces()
            if self.speeds.forwards_s and self.speeds.pieces_s:
                yield from self._context()
                return
            yield pause_s
            pause_s *= 2

    def _forwards(self) -> Iterator[float]:
        yield QUIET_S
        state = self._warm(_CONTEXT_TOKENS // 2)
        yield QUIET_S
        state.prefill(self._ids(state.length))
        sizes = [rows for rows in ROWS if rows <= state.verifiable_rows()]
        timings = self._forward_timings
        for rows in _rounds(sizes or ROWS[:1], timings):
            yield QUIET_S
            known = timings.setdefault(rows, [])
            known.append(self._steps(state, known) if rows == 1 else self._block(state, rows))
        found = believed_sizes(timings, on_cpu=self._on_cpu)
        self.speeds = replace(self.speeds, forwards_s=found)

    def _pieces(self) -> Iterator[float]:
        most = self._loaded.context_tokens // 2
        sizes = [size for size in PIECES if size <= most]
        timings = self._piece_timings
        for tokens in _rounds(sizes or PIECES[:1], timings):
            yield QUIET_S
            state = self._opened()
            timings.setdefault(tokens, []).append(self._piece(state, tokens))
        found = believed_sizes(timings, on_cpu=self._on_cpu)
        self.speeds = replace(self.speeds, pieces_s=found)

    def _context(self) -> Iterator[float]:
        """Time a piece behind a context that is made up: its content changes no time."""
        tokens = max(size for size in self.speeds.pieces_s if size <= _CONTEXT_TOKENS)
        deep = min(_DEEP_TOKENS, self._loaded.context_tokens - tokens)
        timings = []
        for _ in range(ROUNDS):
            yield QUIET_S
            state = self._warm(2)
            needed = state.nbytes_per_token() * (deep + tokens)
            if deep < tokens or not self._has_room(needed) or not state.pretend(deep):
                return
            timings.append(self._piece(state, tokens))
        seconds = believed_s(timings, on_cpu=self._on_cpu)
        if seconds is not None:
            longer_s = max(0.0, seconds - self.speeds.pieces_s[tokens])
            self.speeds = replace(self.speeds, context_s=longer_s / tokens / deep)

    def _steps(self, state: MlxVerifier, known: Sequence[Timing]) -> Timing:
        """One of a few pipelined plain steps; the state ends as it was."""
        before = state.length
        usual_s = min(each.wall_s for each in known) if known else _PLAIN_STEPS_S
        steps = max(1, min(_MOST_STEPS, round(_PLAIN_STEPS_S / usual_s)))
        state.launch(0)
        state.launch(None)
        state.collect()
        timed = self._timed(lambda: _step(state, steps))
        state.collect()
        state.trim(state.length - before)
        return Timing(timed.wall_s / steps, timed.cpu_s / steps)

    def _block(self, state: MlxVerifier, rows: int) -> Timing:
        timed = self._timed(lambda: state.verify(self._ids(rows)))
        state.trim(rows)
        return timed

    def _piece(self, state: MlxVerifier, tokens: int) -> Timing:
        return self._timed(lambda: state.prefill(self._ids(tokens)))

    def _timed(self, work: Callable[[], object]) -> Timing:
        began = self._clock()
        work()
        ended = self._clock()
        wall_s = max(1e-6, ended.wall_s - began.wall_s)
        return Timing(wall_s, ended.cpu_s - began.cpu_s)

    def _warm(self, tokens: int) -> MlxVerifier:
        state = self._opened()
        state.prefill(self._ids(max(1, min(tokens, self._loaded.context_tokens // 4))))
        return state

    def _ids(self, count: int) -> list[int]:
        return [(7919 * position) % self._vocab_size for position in range(count)]


def _step(state: MlxVerifier, steps: int) -> None:
    for _ in range(steps):
        state.launch(None)
        state.collect()


def _rounds(sizes: Sequence[int], timings: _Timings) -> Iterator[int]:
    """The sizes again and again, up to one that is likely to take longer than a slice may."""
    for number in range(ROUNDS):
        for before, size in pairwise([0, *sizes]):
            if number and size not in timings:
                break
            # A forward of twice the rows takes at most twice as long.
            if before and min(timings[before]).wall_s * size / before > SLICE_S:
                break
            yield size
