"""KV blocks between the pages of a node and its engines: references, offers, and the exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

LOGIT_BYTES = 4
"""Of one logit: float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRef:
    """A block by slab name, first page in that slab, and stamp."""

    slab: str
    slab_pages: int
    page_bytes: int
    first: int
    pages: int
    length: int  # bytes that mean something, from the beginning of the first page
    stamp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPages:
    """Pages for one block of KV; `index` counts blocks from the beginning of the history.

    `has_state`: the recurrent state at the end of the block lies behind its KV, or will.
    `tokens` of the block are meant, from its beginning; 0 = a whole block. Of blocks to begin from
    only the last may be shorter; pages to fill may be shorter where a block ends at a cut or with
    the prompt. `is_cut`: a piece of prefill ended behind these tokens, though the block goes on.
    """

    index: int
    pages: PageRef
    has_state: bool = False
    tokens: int = 0
    is_cut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KvOffer:
    """Blocks that one engine process begins from, and the pages that it may fill.

    `logits` are the logits behind the history, float32, little-endian, b"" = not known;
    `wants_logits`: the engine shall tell the exchange of them. `free_bytes`: the engine's KV bound
    can be raised by so much now, without models leaving for it.
    """

    blocks: tuple[KvPages, ...] = ()
    exports: tuple[KvPages, ...] = ()
    logits: bytes = b""
    wants_logits: bool = False
    free_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvHolder:
    """A node with the KV of so many leading tokens of a history; 0 = it is not known of how many.
    `node_id` "" = no node is known to have any."""

    node_id: str = ""
    tokens: int = 0


NO_HOLDER = KvHolder()
NO_KV = KvOffer()
"""An offer of nothing: the engine computes the prompt."""


class KvExchange(Protocol):
    """KV blocks of one generation, between the node's pages and its engines.

    Calls, for each engine process: `offer`, then `imported`, `exported` and `history_logits` as the
    engine's frames come, then `ended` in any case. Never raises: without blocks the engine computes
    the prompt.
    """

    async def offer(self, token_ids: Sequence[int], pid: int) -> KvOffer:
        """Blocks of this history, pinned for the engine process, and pages for further blocks."""
        ...

    def imported(self, tokens: int) -> None:
        """The engine took so many tokens from the offered blocks, and the pins may end."""
        ...

    def exported(self, index: int, tokens: int) -> None:
        """The engine filled the pages of a block, or of a tail of `tokens` tokens; 0 = a block."""
        ...

    def history_logits(self, logits: bytes) -> None:
        """The logits behind the history, in the form of `KvOffer.logits`. Shape: [V]."""
        ...

    async def park(self, lengths: Sequence[int]) -> tuple[PageRef, ...]:
        """Pages of these lengths, in bytes, for KV of this generation, which is set aside.

        The generation keeps the pages until the next call, or until `ended`; no lengths give them
        back. () = there are no pages.
        """
        ...

    def ended(self) -> None:
        """The engine process sends nothing more."""
        ...
