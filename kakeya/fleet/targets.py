"""Whom a gossip round talks to, as a pure choice.

Seeds are hints from a person and are tried until they are live; sightings are hints from the local
network; nothing else is special about either. An expired address costs one call a round, and is
what heals a partition longer than a TTL.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection

from kakeya.fleet.convert import MAX_BATCH_CARDS

DEFAULT_FANOUT = 2
"""At a round each 10 s views of a hundred nodes hold no card older than 58 s then, of a thousand
none older than 68 s, with 30 % of the messages lost (`scripts/simulate`); the TTL is 120 s."""
MAX_SIGHTINGS = 2
MAX_DIALS = 8
"""In one round beside the seeds, whatever cards and the local network claim."""


def choose_targets(
    *,
    live: Collection[str],
    remembered: Collection[str],
    seeds: Collection[str],
    own: Collection[str],
    fanout: int,
    rng: random.Random,
    sightings: Collection[str] = (),
    may_dial: Callable[[str], bool] = lambda address: True,
) -> tuple[str, ...]:
    """Choose every seed that is not live, `fanout` live addresses, two sightings, one lost address.

    Only seeds, which a person typed, are dialled without asking `may_dial`. Sorted inputs are not
    needed: the same sets and the same rng state give the same answer.
    """
    chosen = [a for a in dict.fromkeys(seeds) if a not in live and a not in own]
    taken = set(chosen) | set(own)

    def draw(addresses: Collection[str], count: int) -> list[str]:
        open_to = sorted(set(addresses) - taken)
        rng.shuffle(open_to)
        drawn: list[str] = []
        for address in open_to:
            if len(drawn) >= count:
                break
            if may_dial(address) or address in seeds:
                drawn.append(address)
        taken.update(drawn)
        return drawn

    others = draw(live, fanout)
    others += draw(set(sightings) - set(live), MAX_SIGHTINGS)
    others += draw(set(remembered) - set(live), 1)
    return (*chosen, *others[:MAX_DIALS])


def fit_batch(wires: list[bytes], max_bytes: int, rng: random.Random) -> list[bytes]:
    """Keep the first card and as many others, drawn at random, as fit in one message.

    Each round draws anew, so a view that is larger than a message still reaches everybody.
    """
    per_card_overhead = 4
    if (
        len(wires) <= MAX_BATCH_CARDS
        and sum(map(len, wires)) + per_card_overhead * len(wires) <= max_bytes
    ):
        return wires
    own, *others = wires
    others = rng.sample(others, min(len(others), MAX_BATCH_CARDS - 1))
    batch, size = [own], len(own) + per_card_overhead
    for wire in others:
        size += len(wire) + per_card_overhead
        if size > max_bytes:
            break
        batch.append(wire)
    return batch
