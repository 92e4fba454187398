"""The state of one generation, without I/O: committed tokens, room for more, and its end.

One step of the code that runs the model:

    draft    = something of at most `room()` tokens, possibly empty
    forward over [last committed token] + draft:  rows 0 .. len(draft)
    selected = the verifier's own token of each row
    commit   = `commit(draft, selected)`
    keep the KV of the first `commit.kept_rows` rows, roll the others back

    row        0      1      2      3          kept_rows = 3 when draft 1, 2 were accepted:
    input     last   d[0]   d[1]   d[2]        the KV of last, d[0], d[1] stays, and the token
    selected  s[0]   s[1]   s[2]   s[3]        s[2], which row 3 contradicts, is pending

After every commit the cache holds one position less than `history`: the last token is pending.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kakeya.core.errors import InvalidArgument, InvariantBroken
from kakeya.decoding.draft.acceptance import accept_block
from kakeya.generation.frames import StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The result of one verification.

    `tokens` joined the history, in order; a stop token is among them, last. `accepted` of them
    came from the draft. `kept_rows` of the forward's rows keep their KV.
    """

    tokens: tuple[int, ...]
    accepted: int
    kept_rows: int
    finish: StopReason | None


class Decoding:
    """One generation from a non-empty history up to its stop.

    `max_tokens` counts generated tokens; `context_tokens` bounds history and output together.
    A history that already fills the context is finished from the start.
    Raises InvalidArgument for an empty history or max_tokens below 1.
    """

    __slots__ = ("_context_tokens", "_max_tokens", "_stop", "finish", "generated", "history")

    def __init__(
        self,
        history: Sequence[int],
        *,
        max_tokens: int,
        stop_token_ids: frozenset[int],
        context_tokens: int,
    ) -> None:
        if not history:
            raise InvalidArgument(
                "the history is empty: a generation continues at least one token", param="history"
            )
        if max_tokens < 1:
            raise InvalidArgument(
                f"max_tokens is {max_tokens}, it must be at least 1", param="max_tokens"
            )
        self.history = list(history)
        self.generated = 0
        self.finish: StopReason | None = None
        self._max_tokens = max_tokens
        self._stop = stop_token_ids
        self._context_tokens = context_tokens
        if len(self.history) >= context_tokens:
            self.finish = StopReason.CONTEXT_FULL

    def room(self) -> int:
        """How many draft tokens can still be of use; 0 when one token is left, or none."""
        return 0 if self.finish is not None else self._left() - 1

    def commit(self, draft: Sequence[int], selected: Sequence[int]) -> Commit:
        """Take the confirmed tokens, cut at a stop token, max_tokens or the context.

        `selected` has one entry per row, len(draft) + 1. Raises InvariantBroken after the finish.
        """
        if self.finish is not None:
            raise InvariantBroken("commit_after_finish", f"finished with {self.finish}")
        agreed = accept_block(draft, selected)
        left = self._left()
        tokens = tuple(selected[: min(agreed + 1, left)])
        stop_at = self._first_stop(tokens)
        if stop_at is not None:
            tokens = tokens[: stop_at + 1]
            self.finish = StopReason.STOP_TOKEN
        elif len(tokens) == left:
            self.finish = self._exhausted(len(tokens))
        self.history.extend(tokens)
        self.generated += len(tokens)
        return Commit(
            tokens=tokens,
            accepted=min(agreed, len(tokens)),
            kept_rows=len(tokens),
            finish=self.finish,
        )

    def _left(self) -> int:
        return min(self._max_tokens - self.generated, self._context_tokens - len(self.history))

    def _first_stop(self, tokens: tuple[int, ...]) -> int | None:
        if not self._stop:
            return None
        return next((at for at, token in enumerate(tokens) if token in self._stop), None)

    def _exhausted(self, count: int) -> StopReason:
        if self.generated + count == self._max_tokens:
            return StopReason.MAX_TOKENS
        return StopReason.CONTEXT_FULL
