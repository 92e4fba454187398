"""Bytes that one node sends in a round: digests, answers and pushes, of a fleet with identities.

Nodes gossip in virtual time, through the very code that answers on the wire, until their views are
steady; then ten nodes change their card in each round. Requests, answers and pushes of all nodes
are counted and divided by nodes and rounds. The baseline is every card in full, each time. The one
exchange in twelve rounds that is full is shown apart.

    .venv/bin/python -m benchmarks.gossip_payload
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from benchmarks.fleet_cards import CERTIFICATE_BYTES, NOW, PaddedTrust, fleet_offer
from benchmarks.report import emit
from kakeya.fleet.cards.cards import DEFAULT_INTERVAL_S
from kakeya.fleet.gossip.gossip import FULL_EVERY
from kakeya.fleet.gossip.sync import Sync
from kakeya.fleet.gossip.targets import DEFAULT_FANOUT
from kakeya.fleet.view.beats import MAX_BEATS
from kakeya.fleet.view.digest import SETTLED_S
from kakeya.fleet.view.registry import CapabilityRegistry

GOALS_KB = {25: 3.0, 1000: 60.0}
CHANGED = {25: 1, 1000: 10}
WARM_ROUNDS, COUNTED_ROUNDS = 4, 2


@dataclass(frozen=True)
class Node:
    """A registry and what speaks for it."""

    registry: CapabilityRegistry
    sync: Sync


class Fleet:
    """Nodes whose rounds follow one another evenly; every exchange succeeds."""

    def __init__(self, count: int) -> None:
        self.rng = random.Random(5)
        self.mono = 0.0
        self.sent_bytes = 0
        self.nodes = [self._node(index) for index in range(count)]
        wires = [node.registry.own.wire for node in self.nodes]
        for node in self.nodes:
            node.registry.merge(wires, now=NOW, mono=-SETTLED_S - 1)

    def _node(self, index: int) -> Node:
        registry = CapabilityRegistry(
            f"mini-{index:04d}",
            fleet_offer(index),
            now=NOW,
            mono=0.0,
            trust=PaddedTrust(),
            entropy=self.rng.randbytes,
        )
        for _ in range(self.rng.randrange(MAX_BEATS // 2)):
            registry.own_card.beat_anew(now=NOW, mono=0.0)
        return Node(registry, Sync(registry, rng=self.rng))

    def exchange(self, caller: Node, callee: Node) -> None:
        """One digest exchange, with every byte of it counted."""
        times = {"now": NOW + self.mono, "mono": self.mono}
        request = caller.sync.request(**times)
        response = callee.sync.answer(request, **times).response
        push = caller.sync.accept(response, **times).push
        self.sent_bytes += len(request) + len(response)
        if push is not None:
            self.sent_bytes += len(push)
            callee.sync.take(push, **times)

    def round(self, changed: int) -> None:
        """Every node's turn once, with its changes spread over the round."""
        order = self.rng.sample(self.nodes, len(self.nodes))
        changing = {id(node) for node in self.rng.sample(self.nodes, changed)}
        for node in order:
            self.mono += DEFAULT_INTERVAL_S / len(order)
            if id(node) in changing:
                offer = replace(node.registry.offer, unified_memory_bytes=self.rng.randrange(2**40))
                node.registry.announce(offer, now=NOW + self.mono, mono=self.mono)
            others = self.rng.sample(self.nodes, DEFAULT_FANOUT + 1)
            for peer in [other for other in others if other is not node][:DEFAULT_FANOUT]:
                self.exchange(node, peer)


def main() -> None:
    for count, goal_kb in GOALS_KB.items():
        fleet = Fleet(count)
        for _ in range(WARM_ROUNDS):
            fleet.round(CHANGED[count])
        fleet.sent_bytes = 0
        for _ in range(COUNTED_ROUNDS):
            fleet.round(CHANGED[count])
        ours_kb = fleet.sent_bytes / count / COUNTED_ROUNDS / 1e3
        times = {"now": NOW + fleet.mono, "mono": fleet.mono}
        full_kb = len(fleet.nodes[0].sync.batch(**times)) / 1e3
        baseline_kb = full_kb * 2 * DEFAULT_FANOUT
        emit(
            f"gossip sent per node per round, N={count}, fanout {DEFAULT_FANOUT}, "
            f"{CHANGED[count]} changed bodies, signed cards of {CERTIFICATE_BYTES} B more, kB",
            ours=ours_kb,
            baseline=baseline_kb,
            ratio=ours_kb / baseline_kb,
            goal=f"<= {goal_kb:g} kB",
            met=ours_kb <= goal_kb,
            full_exchange_kb_per_round=round(2 * full_kb / FULL_EVERY, 2),
        )


if __name__ == "__main__":
    main()
