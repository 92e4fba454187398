"""Fetching the KV of a prompt from a peer on loopback against computing it.

Another process serves the blocks of a 1000-token prompt: three whole ones and a tail of 232 tokens
of a 3.7 M parameter model. Measured is what a request waits for: the lookup, the transfer, the
proof of every byte, the copy into pages, and the import from these into a fresh sequence. In turns
with prefill on the engine's own grid; medians. The first fetch of all, which also connects, is told
of beside them.

    .venv/bin/python -m benchmarks.prefix_peer
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc.aio
import numpy as np

from benchmarks.models import random_model
from benchmarks.report import emit, interleaved, median
from kakeya.core.clock import SystemClock
from kakeya.core.units import KIB
from kakeya.engine.kv.blocks import Take, take
from kakeya.engine.model import LoadedFacts, Model
from kakeya.generation.kv import KvPages
from kakeya.memory.pages.content import ContentType, PageConfig
from kakeya.memory.pages.shared_arena import Filling, PageArena
from kakeya.prefix.names.blocks import BlockChain, BlockId
from kakeya.prefix.names.fingerprint import KvFingerprint
from kakeya.prefix.peers.choice import BlockHolder
from kakeya.prefix.peers.fetch import PeerFetch
from kakeya.prefix.peers.seams import (
    TAIL_NAME_BYTES,
    BlockPart,
    FingerprintUsage,
    Loan,
    MissingBlocks,
)
from kakeya.prefix.peers.service import PrefillCacheService
from kakeya.v1.distributed_pb2_grpc import add_PrefillCacheServiceServicer_to_server

TOKENS = 1000
GOAL = 10.0
_CONFIG = PageConfig(page_bytes=512 * KIB, slab_pages=64, total_pages=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt of whatever tokens, and what its KV is called; sizes in bytes."""

    layout: str
    block_tokens: int
    block_bytes: int
    tokens: int

    @property
    def fingerprint(self) -> KvFingerprint:
        """Of no model."""
        return KvFingerprint(
            model_id="bench",
            weights_digest="w",
            layout=self.layout,
            block_tokens=self.block_tokens,
            exactness="e",
        )

    @property
    def ids(self) -> tuple[BlockId, ...]:
        """Of the whole blocks."""
        return self._chain.ids(range(self.tokens))

    @property
    def tail(self) -> BlockPart:
        """What is behind them."""
        tokens = self.tokens % self.block_tokens
        size = self.block_bytes * tokens // self.block_tokens
        return BlockPart(id=self.tails(len(self.ids))[tokens - 1], tokens=tokens, size=size)

    @property
    def _chain(self) -> BlockChain:
        return BlockChain(self.fingerprint.exact(), self.block_tokens)

    def tails(self, blocks: int) -> tuple[BlockId, ...]:
        """What may lie behind so many blocks."""
        rest = range(blocks * self.block_tokens, self.tokens)
        return self._chain.tail_ids(self.ids[blocks - 1] if blocks else None, rest)

    def wanted(self) -> MissingBlocks:
        """All of it, at any price."""
        return MissingBlocks(
            fingerprint=self.fingerprint,
            ids=self.ids,
            have=0,
            block_bytes=self.block_bytes,
            prefill_tokens_per_s=1.0,
            most_slack_s=60.0,
            tails=self.tails,
        )


class Source:
    """The blocks of one prompt, in memory; implements `BlockSource` and `BlockSources`."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        rng = np.random.default_rng(1)
        sizes = dict.fromkeys(prompt.ids, prompt.block_bytes)
        self._blocks = {
            block_id: rng.standard_normal(size // 4, np.float32).tobytes()
            for block_id, size in (sizes | {prompt.tail.id: prompt.tail.size}).items()
        }

    def source(self, exact: bytes) -> Source | None:
        """This one."""
        return self if exact == self._prompt.fingerprint.exact() else None

    def fingerprints(self) -> tuple[KvFingerprint, ...]:
        """Of the prompt."""
        return (self._prompt.fingerprint,)

    def leading(self, ids: Sequence[BlockId]) -> tuple[int, ...]:
        """All, or nothing."""
        return (self._prompt.block_bytes,) * len(ids) if tuple(ids) == self._prompt.ids else ()

    def tail(self, behind: BlockId, names: Sequence[bytes]) -> BlockPart | None:
        """That of the prompt."""
        tail = self._prompt.tail
        return tail if tail.id[:TAIL_NAME_BYTES] in names else None

    def pin(self, ids: Sequence[BlockId]) -> object:
        """Nothing goes."""
        return lambda: None

    async def read(self, block_id: BlockId) -> Loan | None:
        """Lend a block."""
        return Loan(memoryview(self._blocks[block_id]), lambda: None)

    def resident(self) -> Iterable[BlockId]:
        """Whole blocks."""
        return self._prompt.ids

    def usage(self) -> FingerprintUsage:
        """How many."""
        return FingerprintUsage(blocks=len(self._blocks))


async def serve(prompt: Prompt) -> None:
    """Serve a prompt until stdin ends; tells the port."""
    service = PrefillCacheService(
        "peer",
        Source(prompt),
        summary=tuple,
        clock=SystemClock(),
        draw=lambda: secrets.token_hex(16),
    )
    server = grpc.aio.server()
    add_PrefillCacheServiceServicer_to_server(service, server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


class Pages:
    """Pages that one prompt's blocks are laid into; a `BlockSink`."""

    def __init__(self, arena: PageArena) -> None:
        self._arena = arena
        self._tenant = arena.pool.tenant(ContentType.KV_CACHE, "prefixes")
        self._holder = arena.pool.holder("peers")
        self.blocks: list[KvPages] = []
        self._fillings: list[Filling] = []

    async def put(self, index: int, payload: bytearray, tail_tokens: int = 0) -> bool:
        """Lay a block into pages of its own."""
        filling = self._arena.prepare(self._tenant, len(payload), self._holder)
        filling.view[:] = payload
        filling.commit()
        self._fillings.append(filling)
        self.blocks.append(KvPages(index=index, pages=filling.ref, tokens=tail_tokens))
        return True

    def clear(self) -> None:
        """Make room for the next one."""
        for filling in self._fillings:
            self._arena.pool.free(filling.block)
        self._fillings, self.blocks = [], []


class Fetcher:
    """Fetches one prompt from a process that serves it; a context manager."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._loop = asyncio.new_event_loop()
        command = (sys.executable, "-m", "benchmarks.prefix_peer", "--serve")
        self._child = subprocess.Popen(
            (*command, json.dumps(asdict(prompt))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._child.stdout is not None
        address = f"127.0.0.1:{int(self._child.stdout.readline())}"
        blocks = len(prompt.ids)
        self._holder = BlockHolder(node_id="peer", address=address, blocks=blocks)
        channel = self._run(_channel(address))
        self._fetch = PeerFetch(
            channel_for=lambda holder: channel,
            clock=SystemClock(),
            rng=random.Random(1),
            lookup_s=10.0,
        )
        self._channel = channel

    def fetch(self, pages: Pages) -> float:
        """Have all of it in pages; seconds."""
        started = time.perf_counter()
        wanted = self._prompt.wanted()
        count = self._run(self._fetch.fetch(wanted, [self._holder], pages))
        if count != len(self._prompt.ids) + 1:
            raise SystemExit(f"{count} blocks came: {self._fetch.stats}")
        return time.perf_counter() - started

    def __enter__(self) -> Fetcher:
        return self

    def __exit__(self, *error: object) -> None:
        self._run(self._channel.close())
        self._loop.close()
        self._child.communicate()

    def _run(self, work):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        return self._loop.run_until_complete(work)


async def _channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address)


def load() -> Model:
    from kakeya.mlx.numerics.blas import preload_blas

    is_fast = preload_blas(1)
    from kakeya.mlx.loader import load
    from kakeya.mlx.model import MlxModel

    return MlxModel(load(str(random_model("3m")), "3m"), 0.0, is_fast)


def prompt_for(facts: LoadedFacts) -> Prompt:
    """What a prompt of TOKENS tokens is for a model."""
    return Prompt(
        layout=facts.kv_layout,
        block_tokens=facts.kv_block_tokens,
        block_bytes=facts.kv_block_bytes,
        tokens=TOKENS,
    )


def prefill(model: Model) -> float:
    """Compute it; seconds."""
    ids = [(7919 * position) % model.facts.vocab_size for position in range(TOKENS)]
    started = time.perf_counter()
    state = model.open()
    while state.length < TOKENS:
        chunk = model.facts.prefill_chunk_at(state.length)
        state.prefill(ids[state.length : min(TOKENS, (state.length // chunk + 1) * chunk)])
    return time.perf_counter() - started


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        asyncio.run(serve(Prompt(**json.loads(sys.argv[2]))))
        return
    model = load()
    fetches: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        PageArena(_CONFIG, folder=Path(folder), rng=random.Random(folder)) as arena,
        Fetcher(prompt_for(model.facts)) as fetcher,
    ):
        arena.grow()

        def from_peer() -> float:
            started = time.perf_counter()
            pages = Pages(arena)
            fetches.append(fetcher.fetch(pages))
            state = model.open()
            if not take(state, Take(TOKENS, tuple(pages.blocks)), model.facts):
                raise SystemExit("the blocks were not taken")
            seconds = time.perf_counter() - started
            pages.clear()
            return seconds

        first = from_peer()
        taken = interleaved({"peer": from_peer, "prefill": lambda: prefill(model)}, repeats=15)
    ratio = median([p / f for p, f in zip(taken["prefill"], taken["peer"], strict=True)])
    emit(
        "1000 tokens of KV from a peer on loopback against their prefill, ms",
        ours=1000 * median(taken["peer"]),
        baseline=1000 * median(taken["prefill"]),
        ratio=ratio,
        goal=f">={GOAL:.0f}x faster",
        met=ratio >= GOAL,
        fetch_ms=round(1000 * median(fetches[1:]), 2),
        best_ms=round(1000 * min(taken["peer"]), 2),
        best_prefill_ms=round(1000 * min(taken["prefill"]), 2),
        first_ms=round(1000 * first, 2),
        bytes=sum(prompt_for(model.facts).wanted().tail_size(n) for n in (256, 256, 256, 232)),
    )


if __name__ == "__main__":
    main()
