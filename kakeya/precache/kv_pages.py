"""A block of KV in pages, as the node and its engines speak of it."""

from __future__ import annotations

from dataclasses import dataclass

from kakeya.memory.page_ref import PageRef


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPages:
    """Pages for one block of KV; `index` counts blocks from the beginning of the history.

    `has_state`: the recurrent state at the end of the block lies behind its KV, or is to.
    `tokens` of it are meant, from its beginning; 0 = a whole block. Only the last block may be
    shorter: the rest of a prompt, all but its last token.
    """

    index: int
    pages: PageRef
    has_state: bool = False
    tokens: int = 0
