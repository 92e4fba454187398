"""Whom a gossip round talks to, as a pure choice.

Seeds are hints from a person and are tried until they are live; nothing else is special about
them. An expired address costs one call a round, and is what heals a partition longer than a TTL.
"""

from __future__ import annotations

import random
from collections.abc import Collection

DEFAULT_FANOUT = 6
"""At a round each 30 s no card in any view then grows older than 95 s, so a TTL of 120 s holds,
with 10 to 1000 nodes and up to 30 % of the messages lost. With 3 peers it reaches 153 s at 100
nodes and 200 s at 1000 (`tests/fleet/test_convergence.py`)."""


def choose_targets(
    *,
    live: Collection[str],
    remembered: Collection[str],
    seeds: Collection[str],
    own: Collection[str],
    fanout: int,
    rng: random.Random,
) -> tuple[str, ...]:
    """Choose `fanout` live addresses, every seed that is not live, one remembered address.

    Sorted inputs are not needed: the same sets and the same rng state give the same answer.
    """
    reachable = sorted(set(live) - set(own))
    chosen = rng.sample(reachable, min(fanout, len(reachable)))
    chosen += [a for a in dict.fromkeys(seeds) if a not in live and a not in own]
    lost = sorted(set(remembered) - set(live) - set(own) - set(chosen))
    if lost:
        chosen.append(rng.choice(lost))
    return tuple(chosen)


def fit_batch(wires: list[bytes], max_bytes: int, rng: random.Random) -> list[bytes]:
    """Keep the first (own) card and as many others, drawn at random, as fit in one message.

    Each round draws anew, so a view that is larger than a message still reaches everybody.
    """
    per_card_overhead = 4
    if sum(map(len, wires)) + per_card_overhead * len(wires) <= max_bytes:
        return wires
    own, *others = wires
    rng.shuffle(others)
    batch, size = [own], len(own) + per_card_overhead
    for wire in others:
        size += len(wire) + per_card_overhead
        if size > max_bytes:
            break
        batch.append(wire)
    return batch
