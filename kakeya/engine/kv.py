"""Blocks of KV between a generation and the pages that the agent keeps them in.

In: the blocks that the agent pinned are copied into an empty state, once, before anything is
computed. Out: what is computed on the prefill grid is copied into the pages given for it, piece by
piece right after it was computed, because a window forgets. A block that is whole is told of.

    whole blocks   of `facts.kv_block_tokens` tokens, block i from position i * kv_block_tokens
    a tail         the rest of a history behind them, all but its last token

The grid is why KV from pages has the bits that would be computed here: only what was computed on it
is exported, and a tail is taken whole only where it ends with the history, as it did when it was
made. Else it is taken up to the last grid boundary in it, from where prefill goes on. KV that was
decoded is not exported, nor what was computed behind it.

Slabs are mapped for a copy only: one that its owner took away would go on taking memory. Nothing
here fails a generation: without its KV a prompt is computed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kakeya.core.errors import KakeyaError
from kakeya.core.log import event
from kakeya.engine.model import KvView, LoadedFacts, SequenceState
from kakeya.memory.page_ref import PageReader
from kakeya.precache.kv_pages import KvPages

_log = logging.getLogger(__name__)
_FAULTS = (KakeyaError, OSError, ValueError, LookupError, RuntimeError, MemoryError)
"""What a copy from or to pages may raise, whoever is at fault."""


@dataclass(frozen=True, slots=True)
class Take:
    """So many tokens, from these blocks."""

    tokens: int = 0
    blocks: tuple[KvPages, ...] = ()


def room_tokens(pages: KvPages, facts: LoadedFacts) -> int:
    """How many positions the pages have room for; 0 where their length does not fit the model."""
    size = pages.pages.length - (facts.kv_state_bytes if pages.has_state else 0)
    if not facts.kv_block_tokens or (pages.has_state and not facts.kv_state_bytes):
        return 0
    if not facts.kv_block_bytes:
        return 0 if size else pages.tokens or facts.kv_block_tokens
    each = facts.kv_block_bytes // facts.kv_block_tokens
    tokens, surplus = divmod(max(0, size), each)
    return 0 if surplus or tokens > facts.kv_block_tokens else tokens


def grid_floor(facts: LoadedFacts, tokens: int) -> int:
    """The last boundary of the prefill grid at or in front of a position.

    Every position is one where bits do not depend on the pieces.
    """
    if not facts.prefill_grid:
        return tokens
    block = tokens - tokens % facts.kv_block_tokens
    # Pieces get only shorter behind a longer context, each a divisor of those before.
    return tokens - tokens % facts.prefill_chunk_at(block)


def plan_take(blocks: Sequence[KvPages], facts: LoadedFacts, total: int) -> Take:
    """Choose what of the blocks serves a history of which `total` tokens are to be prefilled."""
    best = Take()
    for number, block in enumerate(blocks):
        room = room_tokens(block, facts)
        # Where a model has nothing but state, what lies in front of it is of no use.
        if not room or (facts.kv_block_bytes and block.index != number):
            break
        end = _usable_end(block, room, facts, total)
        if end > best.tokens:
            used = blocks[: number + 1] if facts.kv_block_bytes else (block,)
            best = Take(end, tuple(used))
        if room < facts.kv_block_tokens:
            break
    return best


def _usable_end(block: KvPages, room: int, facts: LoadedFacts, total: int) -> int:
    """Up to which token a block serves a history, such that its bits are those of a prefill."""
    start = block.index * facts.kv_block_tokens
    end = min(start + min(block.tokens or room, room), total)
    ends_alike = end == start + room == total
    if facts.kv_state_bytes and not (block.has_state and end == start + room):
        return 0  # state is that behind the last row
    floor = grid_floor(facts, end)
    # A window that a single row was put into lies in another order than one that is read back.
    exact = end if ends_alike and end - floor != 1 else floor
    return 0 if facts.kv_state_bytes and exact != end else exact


def take(state: SequenceState, plan: Take, facts: LoadedFacts) -> bool:
    """Copy blocks into an empty state; False, and it stays empty, where that fails."""
    try:
        with PageReader() as reader:
            state.import_blocks(
                [
                    KvView(reader.view(block.pages), room_tokens(block, facts), block.has_state)
                    for block in plan.blocks
                ],
                plan.tokens,
            )
    except _FAULTS as fault:
        _tell("blocks of KV could not be taken", fault)
        return False
    state.grid_tokens = grid_floor(facts, plan.tokens)
    return True


class KvExports:
    """The pages of one generation that wait for what it computes."""

    def __init__(self, exports: Sequence[KvPages], facts: LoadedFacts, total: int) -> None:
        """`total`: how many tokens of the history are prefilled."""
        self._facts = facts
        self._total = total
        fitting = [pages for pages in exports if self._fits(pages)]
        self._waiting = deque(sorted(fitting, key=lambda pages: pages.index))
        self._copied = 0

    def computed(self, state: SequenceState, until: int) -> Iterator[int]:
        """Copy what is new of the state's first `until` tokens, all of them computed on the grid.

        Yields the index of each block that is whole.
        """
        while self._waiting:
            pages = self._waiting[0]
            start, end = self._range(pages)
            first, last = max(start, self._copied), min(end, until)
            if last <= first:
                return
            is_whole = last == end
            is_there = self._copy(state, pages, first, last)
            if not is_there or is_whole:
                self._waiting.popleft()
            if is_there and is_whole:
                yield pages.index
            self._copied = last

    def _fits(self, pages: KvPages) -> bool:
        """Whether they have room for a whole block, or for the tail of this very history."""
        room, size = room_tokens(pages, self._facts), self._facts.kv_block_tokens
        ends_right = room == size or self._range(pages)[1] == self._total
        return 0 < room == (pages.tokens or size) and ends_right

    def _range(self, pages: KvPages) -> tuple[int, int]:
        start = pages.index * self._facts.kv_block_tokens
        return start, start + room_tokens(pages, self._facts)

    def _copy(self, state: SequenceState, pages: KvPages, first: int, last: int) -> bool:
        """Copy [first, last); False where the state no longer has that, or the pages are gone."""
        start, end = self._range(pages)
        with_state = pages.has_state and last == end
        if with_state and state.length != end:
            return False
        try:
            with PageReader() as reader:
                into = KvView(reader.fill(pages.pages), end - start, pages.has_state)
                return state.export_block(first, last - first, into, with_state=with_state)
        except _FAULTS as fault:
            _tell("blocks of KV could not be exported", fault)
            # Said once: with the pages behind it, it would most likely go the same way.
            while len(self._waiting) > 1:
                self._waiting.pop()
            return False


def _tell(what: str, fault: Exception) -> None:
    reason = fault.message if isinstance(fault, KakeyaError) else repr(fault)
    event(_log, what, level=logging.WARNING, reason=reason)
