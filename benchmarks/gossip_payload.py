"""Bytes that one node sends in a round: what it pushes to two peers and what it answers to two.

Steady state with ten changed bodies; the baseline is every card in full, each time. Ours is what
`exchange_once` and the service really build.

    .venv/bin/python -m benchmarks.gossip_payload
"""

from __future__ import annotations

import random

from benchmarks.fleet_cards import NOW, fleet_cards, registry
from benchmarks.report import emit
from kakeya.fleet.convert import MAX_BATCH_BYTES, join_cards
from kakeya.fleet.targets import fit_batch
from kakeya.v1 import distributed_pb2 as pb

FANOUT = 2
GOALS_KB = {25: 3.0, 1000: 60.0}


def _sent_kb(count: int) -> tuple[float, float]:
    known = registry()
    known.merge(fleet_cards(count - 1), now=NOW, mono=0.0)
    view = [card.wire for card in known.snapshot(mono=0.0)]
    ours = len(join_cards(fit_batch(view, MAX_BATCH_BYTES, random.Random(1))))
    full = pb.ExchangeCapabilitiesRequest(
        known_nodes=[pb.NodeCapability.FromString(wire) for wire in view]
    )
    calls = 2 * FANOUT  # as many begun as answered
    return ours * calls / 1e3, len(full.SerializeToString()) * calls / 1e3


def main() -> None:
    for count, goal_kb in GOALS_KB.items():
        ours_kb, full_kb = _sent_kb(count)
        emit(
            f"gossip sent per node per round, N={count}, fanout {FANOUT}, kB",
            ours=ours_kb,
            baseline=full_kb,
            ratio=ours_kb / full_kb,
            goal=f"<= {goal_kb:g} kB",
            met=ours_kb <= goal_kb,
        )


if __name__ == "__main__":
    main()
