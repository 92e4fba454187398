"""How far each rank of a ring group is, and when the group counts as stuck. Pure.

A collective waits for all ranks, so one rank that hangs holds up all others, and all go on to beat.
What is told of ranks is therefore the count of commands that they finished: while some rank
has commands left and no count moves, the group is stuck, however alive its processes are.
"""

from __future__ import annotations

BEAT_S = 0.5
"""Each rank says so often how far it is."""
SILENT_S = 6.0
"""A rank that says nothing for so long is lost: it is stopped, or cut off."""
STUCK_S = 8.0
"""A forward may always take so long, and `_SPARE` times as long as those before it did."""
_SPARE = 4.0
_FIRST_TOKEN_S = 0.1
"""Of a piece of a prompt before one was measured: a large model on slow machines takes so long."""
_PIECE_TOKENS = 16
"""A forward of fewer is a step: its time hardly depends on their number."""
_FADES = 0.9
"""The slowest forward counts for less with each one that follows: the machine was busy, maybe."""
LOAD_STUCK_S = 300.0
"""The same while a group is loaded and checked, when files are read behind the first forwards."""


class RingProgress:
    """The counts of all ranks, as rank 0 knows them; not thread-safe."""

    def __init__(self, ranks: int) -> None:
        self._finished = [0] * ranks
        self._sent = [0] * ranks
        self._limit_s = LOAD_STUCK_S
        self._moved_s = 0.0
        self._step_s = 0.0
        self._token_s = 0.0

    def sent(self, rank: int, now_s: float, limit_s: float = STUCK_S) -> None:
        """A rank got one command more, and may be at it for `limit_s` without another count."""
        if not self.pending():
            self._moved_s = now_s  # an idle group was not waited for
        self._sent[rank] += 1
        self._limit_s = limit_s

    def limit_s(self, tokens: int) -> float:
        """How long a forward of so many tokens may take."""
        if tokens < _PIECE_TOKENS:
            return max(STUCK_S, _SPARE * self._step_s)
        if not self._token_s:
            return STUCK_S + _FIRST_TOKEN_S * tokens
        return max(STUCK_S, _SPARE * self._token_s * tokens)

    def took(self, tokens: int, seconds: float) -> None:
        """Learn how long a forward took."""
        if tokens < _PIECE_TOKENS:
            self._step_s = max(seconds, _FADES * self._step_s)
        else:
            self._token_s = max(seconds / tokens, _FADES * self._token_s)

    def finished(self, rank: int, count: int, now_s: float) -> None:
        """A rank has finished so many commands."""
        if count > self._finished[rank]:
            self._finished[rank] = count
            self._moved_s = now_s

    def pending(self) -> list[int]:
        """The ranks that have commands left."""
        pairs = zip(self._sent, self._finished, strict=True)
        return [rank for rank, (sent, finished) in enumerate(pairs) if finished < sent]

    def stuck(self, now_s: float) -> str:
        """Why the group is stuck; "" = it is not."""
        pending = self.pending()
        waited_s = now_s - self._moved_s
        if not pending or waited_s < self._limit_s:
            return ""
        named = ", ".join(map(str, pending))
        return f"no rank got on for {waited_s:.0f} s, and work is left at rank {named}"
