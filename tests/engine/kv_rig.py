"""Pages of a real arena, as the agent would offer them to one engine: by what the history says."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import mlx.core as mx
import numpy as np

from kakeya.core.units import KIB, pack_ids
from kakeya.decoding.draft.acceptance import agreeing
from kakeya.engine.model import LoadedFacts
from kakeya.engine.steps.sequence import SequenceRun
from kakeya.generation.cuts import is_cut, marked, usable
from kakeya.generation.frames import Done, EngineFrame, KvExported, KvImported, KvPark
from kakeya.generation.kv import KvOffer, KvPages
from kakeya.generation.request import DecodeJob
from kakeya.memory.pages.content import ContentType, PageConfig
from kakeya.memory.pages.shared_arena import Filling, PageArena
from tests.engine.rig import Rig
from tests.engine.virtual_rig import Told, VirtualRig

CONFIG = PageConfig(page_bytes=512 * KIB, slab_pages=64, total_pages=256)


@dataclass
class Offer:
    """What goes into a job; `filling` waits for the engine's word, by index and tokens."""

    kv_blocks: tuple[KvPages, ...] = ()
    kv_exports: tuple[KvPages, ...] = ()
    filling: dict[tuple[int, int], tuple[tuple[int, ...], Filling]] = field(default_factory=dict)


@dataclass
class Outcome:
    frames: list[EngineFrame]

    @property
    def imported(self) -> int:
        return next(f.tokens for f in self.frames if isinstance(f, KvImported))

    @property
    def exported(self) -> list[int]:
        return [f.index for f in self.frames if isinstance(f, KvExported)]

    @property
    def filled(self) -> list[tuple[int, int]]:
        """The same with the tokens of what is no whole block."""
        return [(f.index, f.tokens) for f in self.frames if isinstance(f, KvExported)]

    @property
    def done(self) -> Done:
        assert isinstance(self.frames[-1], Done)
        return self.frames[-1]


class Prefixes:
    """Blocks and tails by the text up to their ends."""

    def __init__(self, folder: Path) -> None:
        self.arena = PageArena(CONFIG, folder=folder, rng=random.Random(str(folder)))
        self.tenant = self.arena.pool.tenant(ContentType.KV_CACHE, "prefixes")
        self.holder = self.arena.pool.holder("engine")
        self.blocks: dict[tuple[int, ...], KvPages] = {}
        self.arena.grow()

    def __enter__(self) -> Prefixes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.arena.close()

    def offer(
        self,
        history: Sequence[int],
        facts: LoadedFacts,
        *,
        most: int = 1 << 30,
        cuts: Sequence[int] = (),
    ) -> Offer:
        """The leading blocks that are there, at most so many, and pages for the others.

        Where the next one is not there, another that begins alike is given in part.
        """
        size, total = facts.kv_block_tokens, len(history) - 1
        inner = [cut for cut in cuts if cut < total and cut % size]
        text = tuple(marked(history[:total], inner))
        ends = [*range(size, total + 1, size), *([total] if total % size else [])]
        offer, found = Offer(), []
        for end in (*ends, *inner):
            index = (end - 1) // size
            tokens = end - index * size
            if text[:end] in self.blocks:
                if len(found) == index < most and end in ends:
                    found.append(self.blocks[text[:end]])
                continue
            filling = self.prepare(facts, tokens)
            offer.filling[index, tokens % size] = text[:end], filling
            offer.kv_exports += (self.pages(facts, index, tokens, filling),)
        if len(found) < most:
            found += self._part(text, len(found), facts)
        offer.kv_blocks = tuple(found)
        return offer

    def _part(self, text: tuple[int, ...], index: int, facts: LoadedFacts) -> list[KvPages]:
        """What serves best in the place of a block, without a look at the grid's boundaries."""
        size = facts.kv_block_tokens
        start, best, most = index * size, (), (0, 0)
        wanted = text[start : start + size]
        grid = (tokens for position, tokens in reversed(facts.prefill_grid) if position <= start)
        grain = next(grid, 1)
        for key, pages in self.blocks.items():
            if pages.index != index or key[:start] != text[:start]:
                continue
            shared = agreeing(key[start:], wanted)
            serves = usable(pack_ids(wanted), pack_ids(key[start:]), shared, grain)
            if facts.kv_state_bytes and serves < len(key) - start:
                continue
            if (serves, shared) > most:
                best, most = key, (serves, shared)
        if not best:
            return []
        shared = most[1]
        is_ended = is_cut(pack_ids(best), start + shared)
        return [dataclasses.replace(self.blocks[best], tokens=shared % size, is_cut=is_ended)]

    def prepare(self, facts: LoadedFacts, tokens: int) -> Filling:
        size = facts.kv_block_bytes * tokens // facts.kv_block_tokens + facts.kv_state_bytes
        pages = -(-size // CONFIG.page_bytes)
        if self.arena.pool.free_pages < pages:
            self.arena.grow()
        return self.arena.prepare(self.tenant, size, self.holder)

    def pages(self, facts: LoadedFacts, index: int, tokens: int, filling: Filling) -> KvPages:
        return KvPages(
            index=index,
            pages=filling.ref,
            has_state=facts.kv_state_bytes > 0,
            tokens=tokens % facts.kv_block_tokens,
        )

    def commit(self, offer: Offer, filled: Sequence[tuple[int, int]]) -> None:
        """What the engine filled is there from now on; the others are given back."""
        by_place = {(pages.index, pages.tokens): pages for pages in offer.kv_exports}
        for place, (text, filling) in offer.filling.items():
            if place in filled:
                filling.commit()
                self.blocks[text] = by_place[place]
            else:
                filling.rollback()

    def run(
        self,
        rig: Rig,
        history: Sequence[int],
        *,
        most: int = 1 << 30,
        cuts: tuple[int, ...] = (),
        **job: object,
    ) -> Outcome:
        """A generation that begins from these pages and fills them."""
        offer = self.offer(history, rig.model.facts, most=most, cuts=cuts)
        values: dict[str, object] = {
            "max_tokens": 0,
            "offer": KvOffer(blocks=offer.kv_blocks, exports=offer.kv_exports),
            "cuts": cuts,
        }
        wanted = DecodeJob(token_ids=history, **{**values, **job})  # type: ignore[arg-type]
        outcome = Outcome(list(SequenceRun(rig.model, rig.tools, wanted).frames()))
        self.commit(offer, outcome.filled)
        return outcome


def logits_bits(rig: Rig, key: str, token: int) -> bytes:
    """The bits of the logits behind the KV that was kept under a key and one more token."""
    kept = rig.tools.slots.take(key)
    assert kept is not None
    logits = kept.state.step(mx.array([token], dtype=mx.int32))  # type: ignore[attr-defined]
    return np.array(logits.astype(mx.float32)).tobytes()


class Lender:
    """Lends pages to the parked of a virtual rig; `after_s` says how long it takes, None = never.

    `asked` says who asked, each time.
    """

    def __init__(
        self,
        rig: VirtualRig,
        pages: Prefixes,
        after_s: Callable[[Told], float | None] = lambda told: 0.001,
    ) -> None:
        self.asked: list[int] = []
        self._rig, self._pages, self._after_s = rig, pages, after_s
        self._held: dict[int, list[Filling]] = {}
        rig.parks = self._park

    def end(self) -> None:
        for park_id in tuple(self._held):
            self._give_back(park_id)

    def _park(self, told: Told, frame: KvPark) -> None:
        self._give_back(told.job.park_id)
        after_s = self._after_s(told)
        if not frame.lengths:
            return
        self.asked.append(told.job.park_id)
        if after_s is not None:
            self._rig.at(self._rig.now_s + after_s, lambda: self._lend(told, frame))

    def _lend(self, told: Told, frame: KvPark) -> None:
        park_id = told.job.park_id
        if told.is_over:
            return
        self._give_back(park_id)
        arena, tenant = self._pages.arena, self._pages.tenant
        self._held[park_id] = [
            arena.prepare(tenant, length, self._pages.holder) for length in frame.lengths
        ]
        refs = tuple(filling.ref for filling in self._held[park_id])
        scheduler = self._rig.scheduler
        scheduler.call(lambda: scheduler.lend(park_id, frame.number, refs))

    def _give_back(self, park_id: int) -> None:
        for filling in self._held.pop(park_id, ()):
            filling.rollback()
