"""The prompt of one generation: the KV of it that is there already, and the rest to compute.

A prompt goes on from the KV kept under the job's key, as far as it agrees with the history; or from
blocks of KV, where these reach further. The rest is computed in `Pieces`, and exported on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kakeya.decoding.draft.acceptance import agreeing
from kakeya.engine.kv.blocks import KvExports, plan_take, take
from kakeya.engine.kv.slots import KeptKv, KvSlots
from kakeya.engine.model import Model, SequenceState
from kakeya.engine.steps.pieces import Pieces
from kakeya.generation.frames import KvExported, Progress
from kakeya.generation.request import DecodeJob

LEAST_TOKENS = 32
"""Least tokens to go on from within a piece: fewer take hardly less time to compute."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptPiece:
    """The next piece of a prompt, due: these tokens are to be appended before the next `next`."""

    state: SequenceState
    tokens: list[int]

    def alone(self) -> None:
        """Append them in a forward of their own."""
        self.state.prefill(self.tokens)


class Prompt:
    """The prompt of a job, and `state`, its KV.

    `cached_tokens` of it were not computed here; `imported_tokens` of these came from blocks.
    `content` names the adapter that the KV was computed with.
    """

    __slots__ = (
        "_content",
        "_exports",
        "_facts",
        "_history",
        "_job",
        "_pieces",
        "_slots",
        "cached_tokens",
        "imported_tokens",
        "is_exact",
        "state",
    )

    def __init__(
        self, model: Model, slots: KvSlots, job: DecodeJob, history: list[int], content: str
    ) -> None:
        self._facts = model.facts
        self._slots = slots
        self._job = job
        self._history = history
        self._content = content
        self._pieces = Pieces(model.facts, len(job.token_ids) - 1, job.cuts)
        self._exports = KvExports(job.offer.exports, model.facts, self._pieces)
        self.imported_tokens = 0
        self.state, self.cached_tokens = self._reopen(model)
        self.is_exact = self.state.grid_tokens == self._pieces.total
        """Whether its KV has the bits of a prompt that was computed from its first token."""

    def computed(self) -> Iterator[PromptPiece | Progress | KvExported]:
        """Have the missing tokens computed but the last one, and export each whole block. The first
        frame tells of the cached tokens."""
        history, state, pieces = self._history, self.state, self._pieces
        yield from self._exported(state.grid_tokens)
        if self.cached_tokens:
            yield self._progress()
        while state.length < pieces.total:
            first = state.length
            end = pieces.end(first)
            yield PromptPiece(state, history[first:end])
            self.is_exact = first == state.grid_tokens
            if first == state.grid_tokens:
                if pieces.floor(end) == end:
                    state.grid_tokens = end
                yield from self._exported(end)
            yield self._progress()

    def keep(self) -> None:
        """Keep the KV under the job's key, if it has one."""
        if self._job.kv_key:
            tokens = self._history[: self.state.length]
            self._slots.keep(self._job.kv_key, tokens, self.state, self._content, self._pieces.cuts)

    def _progress(self) -> Progress:
        return Progress(
            computed_tokens=self.state.length,
            total_tokens=self._pieces.total,
            cached_tokens=self.cached_tokens,
        )

    def _exported(self, until: int) -> Iterator[KvExported]:
        for pages in self._exports.computed(self.state, until):
            yield KvExported(index=pages.index, tokens=pages.tokens)

    def _reopen(self, model: Model) -> tuple[SequenceState, int]:
        """Continue the kept KV as far as it agrees with the history, or from blocks that reach
        further, else start empty."""
        job, facts = self._job, self._facts
        kept = self._slots.take(job.kv_key) if job.kv_key else None
        shared = self._shared(kept) if kept is not None else 0
        plan = plan_take(job.offer.blocks, facts, self._pieces)
        if plan.tokens > shared:
            state = model.open()
            if take(state, plan, facts):
                self.imported_tokens = plan.tokens
                return state, plan.tokens
        if kept is not None and shared > 0 and kept.state.trim(kept.state.length - shared):
            kept.state.grid_tokens = self._exact(kept, shared)
            return kept.state, shared
        return model.open(), 0

    def _shared(self, kept: KeptKv) -> int:
        """Tokens of the history to go on from in the kept KV.

        Behind kept KV that does not end with a piece, no block can be exported: a few first tokens,
        such as two conversations have in common, are not worth that.
        """
        if kept.content != self._content:
            return 0
        shared = min(agreeing(kept.tokens, self._history), self._pieces.total)
        is_in_the_way = self._exact(kept, shared) < shared < LEAST_TOKENS
        return 0 if is_in_the_way and self._job.offer.exports else shared

    def _exact(self, kept: KeptKv, shared: int) -> int:
        """Tokens of these that have the bits of this prompt's own pieces."""
        return self._pieces.agreed(kept.cuts, min(kept.state.grid_tokens, shared))
