"""Blocks of KV between a generation and the pages that the agent keeps them in.

In: the blocks that the agent pinned are copied into an empty state, once, before anything is
computed. Out: KV that is computed on the prefill grid is copied into the pages given for it, piece
by piece right after it was computed, because a window forgets. A frame tells of each whole block.

    whole blocks   of `facts.kv_block_tokens` tokens, block i from position i * kv_block_tokens
    a tail         the beginning of a block, up to a cut of the history or its last token but one

KV from pages has the bits that would be computed here because of prefill's pieces: only KV computed
in pieces is exported, and a tail is taken up to the last place in it where a piece ends here too;
prefill goes on from there. Decoded KV is not exported, nor KV computed behind it.

Slabs are mapped for a copy only: a mapped slab that its owner removed would go on taking memory.
Nothing here fails a generation: without its KV a prompt is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kakeya.core.errors import KakeyaError
from kakeya.core.log import event
from kakeya.engine.model import KvView, LoadedFacts, SequenceState
from kakeya.engine.steps.pieces import Pieces
from kakeya.generation.kv import KvPages
from kakeya.memory.pages.reader import PageReader

_log = logging.getLogger(__name__)
FAULTS = (KakeyaError, OSError, ValueError, LookupError, RuntimeError, MemoryError)
"""Exceptions of a copy from or to pages, whether the agent or the engine is at fault."""


@dataclass(frozen=True, slots=True)
class Take:
    """A plan to take so many tokens from these blocks."""

    tokens: int = 0
    blocks: tuple[KvPages, ...] = ()


def room_tokens(pages: KvPages, facts: LoadedFacts) -> int:
    """Positions that the pages have room for; 0 where their length does not fit the model."""
    size = pages.pages.length - (facts.kv_state_bytes if pages.has_state else 0)
    if not facts.kv_block_tokens or (pages.has_state and not facts.kv_state_bytes):
        return 0
    if not facts.kv_block_bytes:
        return 0 if size else pages.tokens or facts.kv_block_tokens
    each = facts.kv_block_bytes // facts.kv_block_tokens
    tokens, surplus = divmod(max(0, size), each)
    return 0 if surplus or tokens > facts.kv_block_tokens else tokens


def plan_take(blocks: Sequence[KvPages], facts: LoadedFacts, pieces: Pieces) -> Take:
    """Choose the blocks that serve a history that is prefilled in these pieces."""
    best = Take()
    for number, block in enumerate(blocks):
        room = room_tokens(block, facts)
        # A model with nothing but state needs no blocks in front of the last one.
        if not room or (facts.kv_block_bytes and block.index != number):
            break
        end = _usable_end(block, room, facts, pieces)
        if end > best.tokens:
            used = blocks[: number + 1] if facts.kv_block_bytes else (block,)
            best = Take(end, tuple(used))
        if room < facts.kv_block_tokens:
            break
    return best


def _usable_end(block: KvPages, room: int, facts: LoadedFacts, pieces: Pieces) -> int:
    """The token up to which a block serves a history with the bits of a prefill."""
    start = block.index * facts.kv_block_tokens
    meant = min(block.tokens or room, room)
    end = min(start + meant, pieces.total)
    is_whole = end == start + room
    exact = pieces.usable(end, ended=is_whole or (block.is_cut and end == start + meant))
    if facts.kv_state_bytes and not (block.has_state and is_whole and exact == end):
        return 0  # state is that behind the last row
    return max(exact, start)


def take(state: SequenceState, plan: Take, facts: LoadedFacts) -> bool:
    """Copy blocks into an empty state; False where that fails, and the state stays empty."""
    try:
        with PageReader() as reader:
            state.import_blocks(
                [
                    KvView(reader.view(block.pages), room_tokens(block, facts), block.has_state)
                    for block in plan.blocks
                ],
                plan.tokens,
            )
    except FAULTS as fault:
        _warn("blocks of KV could not be taken", fault)
        return False
    state.grid_tokens = plan.tokens
    return True


@dataclass(slots=True, eq=False)
class _Export:
    """Pages for positions [start, end), of which those in front of `copied` lie there."""

    pages: KvPages
    start: int
    end: int
    copied: int


class KvExports:
    """Pages that wait for KV that one generation computes."""

    def __init__(self, exports: Sequence[KvPages], facts: LoadedFacts, pieces: Pieces) -> None:
        self._facts = facts
        self._pieces = pieces
        places = [self._place(pages) for pages in exports]
        fitting = [export for export in places if self._fits(export)]
        self._waiting = sorted(fitting, key=lambda export: (export.start, export.end))

    def computed(self, state: SequenceState, until: int) -> Iterator[KvPages]:
        """Copy the new KV of the state's first `until` tokens, all of them computed in pieces.

        Yields the pages of each block, or tail, that is whole.
        """
        for export in tuple(self._waiting):
            if export.start >= until or not self._waiting:
                return
            last = min(export.end, until)
            if last <= export.copied:
                continue
            is_there = self._copy(state, export, last)
            export.copied = last
            is_whole = last == export.end
            if (is_whole or not is_there) and export in self._waiting:
                self._waiting.remove(export)
            if is_there and is_whole:
                yield export.pages

    def _place(self, pages: KvPages) -> _Export:
        start = pages.index * self._facts.kv_block_tokens
        return _Export(pages, start, start + room_tokens(pages, self._facts), start)

    def _fits(self, export: _Export) -> bool:
        """Whether the pages have room for a whole block, or for a tail that ends with a piece."""
        room, size = export.end - export.start, self._facts.kv_block_tokens
        ends_right = room == size or export.end in (*self._pieces.cuts, self._pieces.total)
        return 0 < room == (export.pages.tokens or size) and ends_right

    def _copy(self, state: SequenceState, export: _Export, last: int) -> bool:
        """Copy up to `last`; False where the state has dropped that KV, or the pages are gone."""
        first, pages = export.copied, export.pages
        with_state = pages.has_state and last == export.end
        if with_state and state.length != last:
            return False
        try:
            with PageReader() as reader:
                room = export.end - export.start
                into = KvView(reader.fill(pages.pages), room, pages.has_state)
                return state.export_block(first, last - first, into, with_state=with_state)
        except FAULTS as fault:
            _warn("blocks of KV could not be exported", fault)
            # Said once: with the pages behind it, it would most likely go the same way.
            self._waiting.clear()
            return False


def _warn(message: str, fault: Exception) -> None:
    reason = fault.message if isinstance(fault, KakeyaError) else repr(fault)
    event(_log, message, level=logging.WARNING, reason=reason)
