"""The grant of one engine process for one request: pins on blocks, and pages to fill."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from kakeya.generation.facts import ModelFacts
from kakeya.memory.pages.pins import Hold, PinHolder
from kakeya.memory.pages.shared_arena import Filling
from kakeya.prefix.names.naming import Naming
from kakeya.prefix.names.pieces import Piece
from kakeya.prefix.pages.counts import PrefixCounts, Source
from kakeya.prefix.pages.pages import FingerprintBlocks, Lying, PrefixPages
from kakeya.prefix.tree.answer import Pin


class EngineSeat(Protocol):
    """The facts of a model that a grant needs; `ResidentModel` has them."""

    @property
    def model_id(self) -> str:
        """Its name."""
        ...

    @property
    def facts(self) -> ModelFacts | None:
        """The facts that its engine told."""
        ...

    @property
    def pid(self) -> int | None:
        """The process that serves it; None once that has ended."""
        ...

    async def is_past(self, pid: int) -> bool:
        """Whether an engine process has come round since calls to it were cut off."""
        ...


@dataclass(frozen=True, slots=True)
class Fill:
    """Pages for a piece, and whether recurrent state is to lie behind it."""

    piece: Piece
    filling: Filling
    has_state: bool


@dataclass(slots=True, eq=False)
class KvGrant:
    """See the module. `offered` are tokens of the pinned blocks, in order, with their source;
    `fills` go by the index of the block, and the tokens of a piece that is no whole one."""

    pid: int
    holder: PinHolder
    shelf: FingerprintBlocks
    naming: Naming
    prompt_tokens: int
    pins: list[Hold] = field(default_factory=list)
    kept: Pin[Lying] | None = None
    fills: dict[tuple[int, int], Fill] = field(default_factory=dict)
    offered: list[tuple[int, Source]] = field(default_factory=list)
    imported_tokens: int = 0
    parked: list[Filling] = field(default_factory=list)
    """Pages for its KV while it is parked; no other request uses them."""
    parks: int = 0
    """How often these changed."""
    is_over: bool = False
    """The prompt is computed: the engine writes no more."""

    @property
    def is_free(self) -> bool:
        """Whether the engine has no page of it any more."""
        if not self.holder.is_open:
            return True
        return not self.parked and (self.is_over or not (self.pins or self.fills))

    def took(self, tokens: int, pages: PrefixPages) -> None:
        """Release the pins: the engine has read its blocks."""
        self.imported_tokens = tokens
        pins, self.pins = self.pins, []
        pages.release(pins)
        if self.kept is not None:
            self.kept.unpin()

    def over(self, pages: PrefixPages) -> bool:
        """Give back the pages that were not filled; False = that was done before."""
        if self.is_over:
            return False
        self.is_over = True
        self._give_back(pages)
        return True

    def unpark(self, pages: PrefixPages) -> None:
        """Give back the pages of parked KV."""
        self.parks += 1
        parked, self.parked = self.parked, []
        for filling in parked:
            pages.give_back(filling)

    def release(self, pages: PrefixPages) -> None:
        """Give everything back."""
        self.unpark(pages)
        self._give_back(pages)

    def _give_back(self, pages: PrefixPages) -> None:
        self.took(self.imported_tokens, pages)
        fills, self.fills = self.fills, {}
        for fill in fills.values():
            pages.give_back(fill.filling)

    def renew(self) -> None:
        """Renew the pins: the engine still needs them."""
        for hold in self.pins:
            if hold.pins > 0:
                hold.renew()

    def count(self, cached_tokens: int, counts: PrefixCounts) -> None:
        """Count the tokens of the prompt by where their KV came from; so many were not computed."""
        left = imported = min(self.imported_tokens, cached_tokens)
        for size, source in self.offered:
            counts.tokens[source] += min(size, left)
            left -= min(size, left)
        counts.tokens[Source.LIVE] += cached_tokens - imported
        counts.tokens[Source.COMPUTED] += max(0, self.prompt_tokens - cached_tokens)
