"""Pages of a real arena, as the agent would offer them to one engine: by what the history says."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import mlx.core as mx
import numpy as np

from kakeya.core.units import KIB
from kakeya.decoding.acceptance import agreeing
from kakeya.engine.job import DecodeJob, DoneFrame, EngineFrame, ExportedFrame, ImportedFrame
from kakeya.engine.model import LoadedFacts
from kakeya.engine.sequence import SequenceRun
from kakeya.memory.arena import Filling, PageArena
from kakeya.memory.content import ContentType, PageConfig
from kakeya.precache.kv_pages import KvPages
from tests.engine.rig import Rig

CONFIG = PageConfig(page_bytes=512 * KIB, slab_pages=64, total_pages=256)


@dataclass
class Offer:
    """What goes into a job; `filling` waits for the engine's word."""

    kv_blocks: tuple[KvPages, ...] = ()
    kv_exports: tuple[KvPages, ...] = ()
    filling: dict[int, tuple[tuple[int, ...], Filling]] = field(default_factory=dict)


@dataclass
class Outcome:
    frames: list[EngineFrame]

    @property
    def imported(self) -> int:
        return next(f.tokens for f in self.frames if isinstance(f, ImportedFrame))

    @property
    def exported(self) -> list[int]:
        return [f.index for f in self.frames if isinstance(f, ExportedFrame)]

    @property
    def done(self) -> DoneFrame:
        assert isinstance(self.frames[-1], DoneFrame)
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

    def offer(self, history: Sequence[int], facts: LoadedFacts, *, most: int = 1 << 30) -> Offer:
        """The leading blocks that are there, at most so many, and pages for the others.

        Where the next one is not there, another that begins alike is given in part.
        """
        size, total = facts.kv_block_tokens, len(history) - 1
        ends = [*range(size, total + 1, size), *([total] if total % size else [])]
        offer, found = Offer(), []
        for index, end in enumerate(ends):
            text = tuple(history[:end])
            if text in self.blocks and len(found) == index < most:
                found.append(self.blocks[text])
                continue
            tokens = end - index * size
            offer.filling[index] = text, self.prepare(facts, tokens)
            offer.kv_exports += (self.pages(facts, index, tokens, offer.filling[index][1]),)
        if len(found) < most:
            found += self._part(tuple(history[:total]), len(found), size)
        offer.kv_blocks = tuple(found)
        return offer

    def _part(self, text: tuple[int, ...], index: int, size: int) -> list[KvPages]:
        start = index * size
        shared = {
            key: agreeing(key[start:], text[start:])
            for key, pages in self.blocks.items()
            if pages.index == index and key[:start] == text[:start]
        }
        best = max(shared, key=lambda key: shared[key], default=())
        if not shared.get(best):
            return []
        return [dataclasses.replace(self.blocks[best], tokens=shared[best] % size)]

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

    def commit(self, offer: Offer, exported: Sequence[int]) -> None:
        """What the engine filled is there from now on; the others are given back."""
        by_index = {pages.index: pages for pages in offer.kv_exports}
        for index, (text, filling) in offer.filling.items():
            if index in exported:
                filling.commit()
                self.blocks[text] = by_index[index]
            else:
                filling.rollback()

    def run(
        self, rig: Rig, history: Sequence[int], *, most: int = 1 << 30, **job: object
    ) -> Outcome:
        """A generation that begins from these pages and fills them."""
        offer = self.offer(history, rig.model.facts, most=most)
        values: dict[str, object] = {
            "max_tokens": 0,
            "kv_blocks": offer.kv_blocks,
            "kv_exports": offer.kv_exports,
        }
        wanted = DecodeJob(token_ids=history, **{**values, **job})  # type: ignore[arg-type]
        outcome = Outcome(list(SequenceRun(rig.model, rig.tools, wanted).frames()))
        self.commit(offer, outcome.exported)
        return outcome


def logits_bits(rig: Rig, key: str, token: int) -> bytes:
    """The bits of the logits behind the KV that was kept under a key and one more token."""
    kept = rig.tools.slots.take(key)
    assert kept is not None
    logits = kept.state.step(mx.array([token], dtype=mx.int32))  # type: ignore[attr-defined]
    return np.array(logits.astype(mx.float32)).tobytes()
