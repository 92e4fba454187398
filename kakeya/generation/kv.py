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


@dataclass(frozen=True, slots=True, kw_only=True)
class KvOffer:
    """What one engine process begins from, and the pages that it may fill.

    `logits` are those behind the history, float32, little-endian, b"" = not known;
    `wants_logits`: the exchange is to be told of them.
    """

    blocks: tuple[KvPages, ...] = ()
    exports: tuple[KvPages, ...] = ()
    logits: bytes = b""
    wants_logits: bool = False


NO_KV = KvOffer()
"""An offer of nothing: the engine computes the prompt."""


class KvExchange(Protocol):
    """KV blocks of one generation, between the node's pages and its engines.

    For each engine process that is asked: `offer`, then `imported`, `exported` and `history_logits`
    as it tells, then `ended`, whatever happened. Never raises: without blocks a prompt is computed.
    """

    async def offer(self, token_ids: Sequence[int], pid: int) -> KvOffer:
        """Blocks of this history, pinned for the engine process, and pages for others."""
        ...

    def imported(self, tokens: int) -> None:
        """The engine took so many tokens from the offered blocks, and needs them no longer."""
        ...

    def exported(self, index: int, tokens: int) -> None:
        """The engine filled the pages of a block, or of a tail with so many tokens; 0 = a block."""
        ...

    def history_logits(self, logits: bytes) -> None:
        """The logits behind the history, as an offer is to have them. Shape: [V]."""
        ...

    async def park(self, lengths: Sequence[int]) -> tuple[PageRef, ...]:
        """Pages of these lengths, in bytes, for KV of this generation, which is set aside.

        They are its own until the next call, or until `ended`. () = there are none, or, with no
        lengths, it needs none any more.
        """
        ...

    def ended(self) -> None:
        """No more comes from this engine process."""
        ...
