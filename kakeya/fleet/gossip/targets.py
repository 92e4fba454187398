"""Chooses the targets of a gossip round; pure.

Seeds are hints of the operator and are tried until they are live; sightings are hints from the
local network; nothing else is special about either. An expired address costs one call a round, and
heals a partition that lasted longer than a TTL.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain, islice

from kakeya.fleet.cards.convert import MAX_BATCH_CARDS

DEFAULT_FANOUT = 2
"""With a round each 10 s and 30 % of the messages lost, views of a hundred nodes then hold no card
older than 58 s, of a thousand nodes none older than 76 s (`scripts/simulate`); the TTL is 120 s."""
MAX_SIGHTINGS = 2
MAX_DIALS = 8
"""Most targets of one round beside the seeds, whatever cards and the local network claim."""


def choose_targets(
    *,
    live: Sequence[str],
    remembered: Collection[str],
    seeds: Collection[str],
    own: Collection[str],
    fanout: int,
    rng: random.Random,
    sightings: Collection[str] = (),
    may_dial: Callable[[str], bool] = lambda address: True,
) -> tuple[str, ...]:
    """Choose every seed that is not live, `fanout` live addresses, two sightings, one lost address.

    Only seeds, which the operator typed, are dialled without the check of `may_dial`. The same
    addresses, the live ones in the same order, and the same rng state give the same answer. Of the
    live addresses only drawn ones are read, unless there are others to tell from them.
    """
    others = {*seeds, *sightings, *remembered}
    living = others.intersection(live) if others else others
    chosen = [a for a in dict.fromkeys(seeds) if a not in living and a not in own]
    taken = set(chosen) | set(own)

    def draw(addresses: Sequence[str], count: int) -> list[str]:
        drawn: list[str] = []
        for address in in_random_order(addresses, rng):
            if len(drawn) >= count:
                break
            if address not in taken and (may_dial(address) or address in seeds):
                taken.add(address)
                drawn.append(address)
        return drawn

    dialled = draw(live, fanout)
    dialled += draw(sorted(set(sightings) - living), MAX_SIGHTINGS)
    dialled += draw(sorted(set(remembered) - living), 1)
    return (*chosen, *dialled[:MAX_DIALS])


def in_random_order(items: Sequence[str], rng: random.Random) -> Iterator[str]:
    """Draw without replacement; costs only as many draws as are taken."""
    moved: dict[int, str] = {}
    for left in range(len(items), 0, -1):
        at, last = rng.randrange(left), left - 1
        yield moved[at] if at in moved else items[at]
        moved[at] = moved[last] if last in moved else items[last]


def fit_batch(wires: list[bytes], max_bytes: int, rng: random.Random) -> list[bytes]:
    """Keep the first card and as many others, from a random one on, as fit in one message.

    Each round draws again, so a view that is larger than a message still reaches every node.
    """
    per_card_overhead = 4
    if (
        len(wires) <= MAX_BATCH_CARDS
        and sum(map(len, wires)) + per_card_overhead * len(wires) <= max_bytes
    ):
        return wires
    own, *others = wires
    batch, size = [own], len(own) + per_card_overhead
    first = rng.randrange(len(others)) if others else 0
    for wire in chain(islice(others, first, None), islice(others, first)):
        size += len(wire) + per_card_overhead
        if size > max_bytes or len(batch) >= MAX_BATCH_CARDS:
            break
        batch.append(wire)
    return batch
