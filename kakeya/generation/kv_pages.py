"""A block of KV in pages, as the node and its engines speak of it."""

from __future__ import annotations

from dataclasses import dataclass

from kakeya.memory.pages.page_ref import PageRef


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPages:
    """Pages for one block of KV; `index` counts blocks from the beginning of the history.

    `has_state`: the recurrent state at the end of the block lies behind its KV, or is to.
    `tokens` of it are meant, from its beginning; 0 = a whole block. Of blocks to begin from only
    the last may be shorter; of pages to fill those for what ends at a cut, or with the prompt.
    `is_cut`: a piece of prefill ended behind the tokens that are meant, though the block goes on.
    """

    index: int
    pages: PageRef
    has_state: bool = False
    tokens: int = 0
    is_cut: bool = False
