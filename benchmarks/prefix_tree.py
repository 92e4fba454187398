"""What it costs to find a prefix among 10,000 blocks, and to keep them in the order of eviction.

A thousand conversations of ten blocks fork from system prompts of forty; a request asks for 10,000
tokens, hashing included. The baseline compares the request with each kept prompt, as caches of
whole prompts do (mlx-lm's trie aside). Each figure is processor time, what an event loop would pay
on a machine with nothing else to do, and a median of batches taken in turns.

    .venv/bin/python -m benchmarks.prefix_tree
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable

from benchmarks.report import emit, interleaved, median, percentile
from kakeya.core.units import MIB, pack_ids
from kakeya.generation.retention import BlockClass, Retention
from kakeya.prefix.names.blocks import BlockChain
from kakeya.prefix.peers.filter import Filter
from kakeya.prefix.tree.node import BlockFacts
from kakeya.prefix.tree.tree import PrefixTree

TOKENS, BLOCKS, SHARED, OWN, SYSTEMS = 256, 10_000, 40, 10, 2
CONVERSATIONS = (BLOCKS - SYSTEMS * SHARED) // OWN
REPEATS, CALLS = 21, 100
CHAIN = BlockChain(bytes(32), TOKENS)


class Kept:
    """A tree full of conversations, and the histories in it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 0.0
        self.tree: PrefixTree[int] = PrefixTree(TOKENS)
        self.systems = [self.tokens(SHARED) for _ in range(SYSTEMS)]
        self.histories = [self.fork() for _ in range(CONVERSATIONS)]
        for history in self.histories:
            self.keep(history)
            self.evict()

    def tokens(self, blocks: int) -> list[int]:
        """Draw some."""
        return [self.rng.randrange(150_000) for _ in range(blocks * TOKENS)]

    def fork(self) -> list[int]:
        """Begin a conversation."""
        return [*self.rng.choice(self.systems), *self.tokens(OWN)]

    def keep(self, history: list[int]) -> float:
        """Take a history in; seconds a block, hashing aside."""
        ids = CHAIN.ids(history)
        facts = [
            BlockFacts(
                token_ids=pack_ids(history[index * TOKENS : (index + 1) * TOKENS]),
                nbytes=9 * MIB,
                recompute_s=0.5 + index / 100,
                block_class=BlockClass.SYSTEM if index < SHARED else BlockClass.USER,
                retention=Retention.LONG,
            )
            for index in range(len(ids))
        ]
        self.now += 1.0
        started = time.process_time()
        first = self.tree.match(ids).depth_ram
        self.tree.touch(ids, self.now)
        for index in range(first, len(ids)):
            self.tree.insert(ids, index, index, facts[index], self.now)
        return (time.process_time() - started) / max(1, len(ids) - first)

    def evict(self) -> float:
        """Bring it back to its size; seconds a block, 0 = there was nothing to do."""
        surplus = self.tree.ram_bytes - BLOCKS * 9 * MIB
        if surplus <= 0:
            return 0.0
        started = time.process_time()
        victims = self.tree.victims(surplus)
        for node in victims:
            self.tree.lose(node.id)
        return (time.process_time() - started) / len(victims)


def each(work: Callable[[], object]) -> Callable[[], float]:
    """Seconds of one call, over many."""

    def measure() -> float:
        started = time.process_time()
        for _ in range(CALLS):
            work()
        return (time.process_time() - started) / CALLS

    return measure


def scan(kept: Kept, asked: list[int]) -> int:
    """Find the longest shared prefix by looking at every kept prompt, in slices of blocks."""
    best = 0
    for history in kept.histories:
        depth = 0
        while depth < len(asked) and (
            history[depth : depth + TOKENS] == asked[depth : depth + TOKENS]
        ):
            depth += TOKENS
        best = max(best, depth)
    return best


def once(work: Callable[[], object]) -> Callable[[], float]:
    def measure() -> float:
        started = time.process_time()
        work()
        return time.process_time() - started

    return measure


def main() -> None:
    gc.disable()  # as a collection in the middle of a batch is not what is measured
    kept = Kept(random.Random(5))
    asked = kept.histories[-1][: 10_000 // TOKENS * TOKENS]
    ids = CHAIN.ids(asked)
    keyed = BlockChain(bytes(32), TOKENS, b"k" * 32)
    fork = CHAIN.ids(kept.systems[0])[-1]
    rest = kept.tokens(1)
    some = [node.id for node, _ in zip(kept.tree, range(2000), strict=False)]
    evictions: list[float] = []

    def turn_over() -> float:
        spent = kept.keep(kept.fork())
        evictions.append(kept.evict())
        return spent

    def pin() -> None:
        pinned = kept.tree.pin(ids)
        if pinned is not None:
            pinned.unpin()

    taken = interleaved(
        {
            "find": each(lambda: kept.tree.match(CHAIN.ids(asked))),
            "scan": once(lambda: scan(kept, asked)),
            "hash": each(lambda: CHAIN.ids(asked)),
            "hash_keyed": each(lambda: keyed.ids(asked)),
            "match": each(lambda: kept.tree.match(ids)),
            "touch": each(lambda: kept.tree.touch(ids, kept.now)),
            "pin_unpin": each(pin),
            "tail_of_500": each(lambda: kept.tree.tail(fork, rest)),
            "victims_1": each(lambda: kept.tree.victims(1)),
            "victims_100": each(lambda: kept.tree.victims(900 * MIB)),
            "insert": turn_over,
            "expired_none": each(lambda: kept.tree.expired(kept.now)),
            "expired_all": once(lambda: kept.tree.expired(kept.now + 3700.0)),
            "filter_of_2000": once(lambda: Filter.of(some)),
        },
        repeats=REPEATS,
    )
    us = {name: median(values) * 1e6 for name, values in taken.items()}
    us["evict"] = median(evictions) * 1e6
    emit(
        "10,000 tokens hashed and found among 10,000 blocks, us",
        ours=us["find"],
        baseline=us["scan"],
        ratio=us["scan"] / us["find"],
        goal="< 1000 us",
        met=us["find"] < 1000,
        blocks=kept.tree.stats().ram_blocks,
        find_p90_us=round(percentile(taken["find"], 0.9) * 1e6, 1),
        others_us={n: round(v, 2) for n, v in us.items() if n not in ("find", "scan")},
    )


if __name__ == "__main__":
    main()
