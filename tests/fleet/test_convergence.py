"""The default pace (TTL 120 s, 30 s, fanout 6) in virtual time: rounds to spread, nobody lost.

Views are reduced to the stamps that the merge compares, one row per node, so a thousand nodes fit
in a test; `test_gossip.py` runs the real parts at small sizes.
"""

from __future__ import annotations

import heapq
import math
import random

import numpy as np
import pytest

from kakeya.fleet.cards import DEFAULT_TTL_S
from kakeya.fleet.gossip import GossipConfig

PACE = GossipConfig()


class Stamps:
    """Rows of stamps: `view[i, j]` is the newest card of j that i holds."""

    def __init__(self, count: int, seed: int, loss: float) -> None:
        self.view = np.full((count, count), -math.inf)
        self.rng = random.Random(seed)
        self.loss = loss
        self.now = 0.0

    def exchange(self, caller: int, callee: int) -> None:
        """Push-pull; the request or the answer alone may be lost."""
        view = self.view
        view[caller, caller] = self.now
        if self.rng.random() < self.loss:
            return
        np.maximum(view[callee], view[caller], out=view[callee])
        view[callee, callee] = self.now
        if self.rng.random() >= self.loss:
            np.maximum(view[caller], view[callee], out=view[caller])

    def pick(self, caller: int, fanout: int) -> list[int]:
        """Peers of one round, uniform and without the caller."""
        peers = self.rng.sample(range(len(self.view) - 1), fanout)
        return [peer + (peer >= caller) for peer in peers]


def _oldest_age_s(
    count: int, loss: float, seed: int, seconds: float, fanout: int = PACE.fanout
) -> float:
    """The greatest age of any card in any view, looked at before each round of its holder."""
    fleet = Stamps(count, seed, loss)
    fleet.view[:] = 0.0
    due = [(fleet.rng.random() * PACE.interval_s, node) for node in range(count)]
    heapq.heapify(due)
    oldest = 0.0
    while due[0][0] < seconds:
        fleet.now, node = heapq.heappop(due)
        fleet.view[node, node] = fleet.now
        oldest = max(oldest, fleet.now - float(fleet.view[node].min()))
        for peer in fleet.pick(node, fanout):
            fleet.exchange(node, peer)
        jitter = 1 + PACE.jitter * (2 * fleet.rng.random() - 1)
        heapq.heappush(due, (fleet.now + PACE.interval_s * jitter, node))
    return oldest


@pytest.mark.parametrize("loss", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("count", [10, 100])
def test_nobody_is_falsely_absent_for_an_hour(count: int, loss: float) -> None:
    assert _oldest_age_s(count, loss, seed=1, seconds=3600) <= DEFAULT_TTL_S


@pytest.mark.parametrize("loss", [0.0, 0.1, 0.3])
def test_nobody_is_falsely_absent_among_a_thousand(loss: float) -> None:
    assert _oldest_age_s(1000, loss, seed=1, seconds=1200) <= DEFAULT_TTL_S


@pytest.mark.parametrize(("fanout", "loss"), [(1, 0.0), (3, 0.3)])
def test_with_fewer_peers_a_round_a_hundred_nodes_lose_each_other(fanout: int, loss: float) -> None:
    """The control, and why the default is not smaller."""
    assert _oldest_age_s(100, loss, seed=1, seconds=3600, fanout=fanout) > DEFAULT_TTL_S


@pytest.mark.parametrize(("loss", "extra_rounds"), [(0.0, 1), (0.1, 3), (0.3, 8)])
@pytest.mark.parametrize("count", [10, 25, 100])
def test_a_view_spreads_in_logarithmic_rounds(count: int, loss: float, extra_rounds: int) -> None:
    """One peer a round; 200 seeds, of which 99 % keep the bound."""
    limit = math.ceil(math.log2(count)) + extra_rounds
    seeds = 200 if count < 100 else 40
    late = sum(_rounds_to_full(count, loss, seed) > limit for seed in range(seeds))
    assert late <= seeds // 100


def _rounds_to_full(count: int, loss: float, seed: int) -> int:
    fleet = Stamps(count, seed, loss)
    for node in range(count):
        fleet.view[node, node] = 0.0
    rounds = 0
    while np.isneginf(fleet.view).any():
        rounds += 1
        order = list(range(count))
        fleet.rng.shuffle(order)
        for node in order:
            fleet.exchange(node, *fleet.pick(node, 1))
    return rounds
