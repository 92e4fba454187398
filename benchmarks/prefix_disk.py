"""Stored prefixes: reading the KV of a prompt back from disk, against computing it again.

Reads the blocks of a 1000-token prompt into pages-like memory through the store, proof included,
with the files in the page cache (a restart of the node) and, on Linux, out of it (a restart of the
machine). Beside it: what writing takes, flushes included, and what a start takes to look through
many files. How long the prefill takes is given, as another benchmark measured it on this machine.

    .venv/bin/python -m benchmarks.prefix_disk --prefill-ms 900
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.report import emit, median
from kakeya.core.clock import SystemClock
from kakeya.core.units import GIB, MIB
from kakeya.precache.blocks import ROOT
from kakeya.precache.disk import BlockStore
from kakeya.precache.disk_files import BlockFolder
from kakeya.precache.disk_stats import DiskConfig
from kakeya.precache.kvb import StoredBlock, pack_tokens
from kakeya.precache.retention import Retention

BLOCK_TOKENS = 256
GOAL = 20.0
FACTS = {"model_id": "bench", **{f"digest_{i}": "sha256:" + "0" * 64 for i in range(6)}}
Made = tuple[StoredBlock, bytes]


def prompt_of(tokens: int, token_bytes: int, salt: int = 0) -> list[Made]:
    """The blocks of a prompt: whole ones, then its tail."""
    made: list[Made] = []
    parent = ROOT
    for index, first in enumerate(range(0, tokens, BLOCK_TOKENS)):
        ids = range(first, min(first + BLOCK_TOKENS, tokens))
        payload = os.urandom(len(ids) * token_bytes)
        block = StoredBlock(
            id=hashlib.sha256(b"%d" % salt + payload[:1024]).digest(),
            parent=parent,
            fingerprint=bytes(32),
            facts=FACTS,
            index=index,
            packed_ids=pack_tokens(ids),
            payload_bytes=len(payload),
        )
        made.append((block, payload))
        parent = block.id
    return made


def config() -> DiskConfig:
    return DiskConfig(cap_bytes=16 * GIB, queue_bytes=GIB, keep_free_bytes=0)


def forget_cached(folder: Path) -> bool:
    """Take files out of the page cache; False where that cannot be done."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in folder.rglob("*.kvb"):
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
    return True


async def read_ms(store: BlockStore, made: list[Made], rooms: list[bytearray]) -> float:
    began = time.perf_counter()
    found = await asyncio.gather(
        *(
            store.read_into(block.id, memoryview(r))
            for (block, _), r in zip(made, rooms, strict=True)
        )
    )
    spent_s = time.perf_counter() - began
    if not all(found) or any(room != made[i][1] for i, room in enumerate(rooms)):
        raise SystemExit("what was read is not what was written")
    return spent_s * 1000


async def measure(folder: Path, tokens: int, token_bytes: int, repeats: int) -> dict[str, float]:
    made = prompt_of(tokens, token_bytes)
    others = [one for salt in range(1, 9) for one in prompt_of(tokens, token_bytes, salt)]
    rooms = [bytearray(len(payload)) for _, payload in made]
    async with BlockStore(folder, config(), clock=SystemClock()) as store:
        await store.ready()
        began = time.perf_counter()
        for one in (*made, *others):
            await store.put(*one)
        await store.flush()
        write_s = time.perf_counter() - began
    async with BlockStore(folder, config(), clock=SystemClock()) as store:
        await store.ready()
        cpu_s = time.process_time()
        cached = [await read_ms(store, made, rooms) for _ in range(repeats)]
        cpu_s = time.process_time() - cpu_s
        uncached: list[float] = []
        while len(uncached) < repeats and forget_cached(folder):
            uncached.append(await read_ms(store, made, rooms))
    written = sum(block.payload_bytes for block, _ in (*made, *others))
    found = {
        "cached": median(cached),
        "cpu_ms": cpu_s / repeats * 1000,
        "write_mb_s": written / 1e6 / write_s,
    }
    return found | ({"uncached": median(uncached)} if uncached else {})


def index_ms(folder: Path, files: int) -> float:
    """Look through so many files as a start does."""
    made, _ = prompt_of(1, 64)[0]
    blocks = BlockFolder(folder, quarantine_bytes=MIB)
    packed = pack_tokens(range(BLOCK_TOKENS))
    for number in range(files):
        block_id = hashlib.sha256(b"%d" % number).digest()
        block = replace(made, id=block_id, packed_ids=packed)
        blocks.write(block, bytes(64), Retention.LONG, time.time())
    taken: list[float] = []
    for _ in range(3):
        began = time.perf_counter()
        if len(blocks.scan().files) != files:
            raise SystemExit("files are missing")
        taken.append((time.perf_counter() - began) * 1000)
    return median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill-ms", type=float, required=True, help="of this prompt, cold")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--token-bytes", type=int, default=4200, help="KV of one token")
    parser.add_argument("--files", type=int, default=2000, help="for the start")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = asyncio.run(
            measure(folder / "kv", options.tokens, options.token_bytes, options.repeats)
        )
        start_ms = index_ms(folder / "many", options.files)
    ratio = options.prefill_ms / found["cached"]
    emit(
        f"ms to read the KV of a {options.tokens}-token prompt from disk, against prefill",
        ours=found["cached"],
        baseline=options.prefill_ms,
        ratio=ratio,
        goal=f">= {GOAL:.0f}x",
        met=ratio >= GOAL,
        prompt_bytes=options.tokens * options.token_bytes,
        cpu_ms=round(found["cpu_ms"], 2),
        uncached_ms=round(found.get("uncached", 0.0), 2),
        write_mb_s=round(found["write_mb_s"], 1),
        start_ms=round(start_ms, 1),
        start_files=options.files,
    )


if __name__ == "__main__":
    main()
