"""Blocks and stores for the tests of the disk."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from kakeya.core.clock import Clock
from kakeya.core.units import MIB
from kakeya.prefix.disk.index import Usable, all_usable
from kakeya.prefix.disk.kvb import StoredBlock, pack_tokens
from kakeya.prefix.disk.stats import DiskConfig
from kakeya.prefix.disk.store import BlockStore
from kakeya.prefix.names.blocks import ROOT, BlockId
from tests.fakes import FakeClock

FINGERPRINT = hashlib.sha256(b"a model").digest()
Made = tuple[StoredBlock, bytes]


def config_of(cap_bytes: int = 64 * MIB, **more: object) -> DiskConfig:
    """A shape for tests: nothing is kept free, so that they run on any disk."""
    return replace(DiskConfig(cap_bytes=cap_bytes, keep_free_bytes=0), **more)  # type: ignore[arg-type]


def opened(
    folder: Path,
    config: DiskConfig | None = None,
    *,
    clock: Clock | None = None,
    stored: Callable[[Collection[BlockId]], None] = lambda _ids: None,
    lost: Callable[[Collection[BlockId]], None] = lambda _ids: None,
    usable: Usable = all_usable,
) -> BlockStore:
    return BlockStore(
        folder / "kv",
        config or config_of(),
        clock=clock or FakeClock(),
        stored=stored,
        lost=lost,
        usable=usable,
    )


def block_of(
    seed: int = 0, *, parent: BlockId = ROOT, index: int = 0, size: int = 1000, **more: object
) -> Made:
    """A block with bytes of its own."""
    payload = _bytes_of(seed, size)
    fields = {"fingerprint": FINGERPRINT, "created_at": 1_700_000_000.0, **more}
    block = StoredBlock(
        id=hashlib.sha256(b"%d" % seed + parent).digest(),
        parent=parent,
        facts={"model_id": "tiny", "block_tokens": 8},
        index=index,
        packed_ids=pack_tokens(range(seed, seed + 8)),
        payload_bytes=size,
        **fields,  # type: ignore[arg-type]
    )
    return block, payload


def chain_of(count: int, *, seed: int = 0, size: int = 1000, **more: object) -> list[Made]:
    """A history: each block's parent is the one before it."""
    made: list[Made] = []
    parent = ROOT
    for index in range(count):
        made.append(block_of(seed + index, parent=parent, index=index, size=size, **more))
        parent = made[-1][0].id
    return made


@functools.cache
def _bytes_of(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)
