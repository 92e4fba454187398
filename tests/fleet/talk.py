"""Nodes that talk without I/O, each with a clock of its own, in virtual time."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kakeya.fleet.cards.cards import Card, CardFault, CardTrust, OfferedModel
from kakeya.fleet.cards.convert import from_wire
from kakeya.fleet.gossip.sync import Sync
from kakeya.fleet.view.registry import CapabilityRegistry, MergeReport
from kakeya.fleet.view.slices import finish
from kakeya.fleet.view.tombstones import RegistryState
from tests.fleet.nodes import NOW, Times, make_registry

FANOUT = 2
INTERVAL_S = 10.0


class ToyTrust:
    """Signs by a word that only this fleet knows; what a node says of others it cannot sign."""

    WORD = b"\xfa\x3f\x04word"  # field 1023, written last

    def __init__(self, name: str) -> None:
        self.name = name
        self.revoked: set[str] = set()
        self.warmed = 0

    def seal(self, body: bytes) -> bytes:
        return body + self.WORD + self.name.encode()[:0]

    def fault_of(self, card: Card, now: float) -> CardFault | None:
        if card.node_id in self.revoked:
            return CardFault.REVOKED
        return None if card.wire.endswith(self.WORD) else CardFault.UNSIGNED

    def warm(self, wires: Sequence[bytes]) -> None:
        self.warmed += len(wires)


@dataclass
class Party:
    """One node: `skew_s` is what its wall clock is wrong by, `asleep_s` what its monotonic lost."""

    name: str
    registry: CapabilityRegistry
    sync: Sync
    skew_s: float = 0.0
    asleep_s: float = 0.0
    is_up: bool = True
    reports: list[MergeReport] = field(default_factory=list)

    def times(self, t: float) -> Times:
        return {"now": NOW + t + self.skew_s, "mono": t - self.asleep_s}

    def sees(self, t: float) -> set[str]:
        view = self.registry.snapshot(mono=t - self.asleep_s)
        return {card.node_id for card in view}


def make_party(
    name: str,
    *,
    t: float = 0.0,
    skew_s: float = 0.0,
    trust: CardTrust | None = None,
    incarnation: int = 1,
    memory: RegistryState | None = None,
    address: str = "",
    seed: int | None = None,
    models: Sequence[OfferedModel] = (),
) -> Party:
    registry = make_registry(
        name,
        now=NOW + t + skew_s,
        mono=t,
        trust=trust,
        incarnation=incarnation,
        memory=memory,
        address=address,
        seed=seed,
        models=models,
    )
    return Party(name, registry, Sync(registry, rng=random.Random(name)), skew_s)


def exchange(caller: Party, callee: Party, t: float) -> int:
    """A digest exchange; returns the bytes that crossed."""
    request = caller.sync.request(**caller.times(t))
    answered = callee.sync.answer(request, **callee.times(t), peer=caller.registry.node_id)
    accepted = caller.sync.accept(
        answered.response, **caller.times(t), peer=callee.registry.node_id
    )
    callee.reports.append(answered.report)
    caller.reports.append(accepted.report)
    push = accepted.push or b""
    if push:
        peer = caller.registry.node_id
        callee.reports.append(callee.sync.take(push, **callee.times(t), peer=peer))
    return len(request) + len(answered.response) + len(push)


def exchange_in_full(caller: Party, callee: Party, t: float) -> None:
    request = caller.sync.batch(**caller.times(t))
    answered = finish(callee.sync.answering_batch(request, **callee.times(t)))
    callee.reports.append(answered.report)
    taken = finish(caller.sync.taking_batch(answered.response, **caller.times(t)))
    caller.reports.append(taken.report)


class Town:
    """Parties whose rounds happen in order of virtual time; each knows everybody's address."""

    def __init__(self, parties: Iterable[Party], seed: int, *, loss: float = 0.0) -> None:
        self.parties = {party.name: party for party in parties}
        self.rng = random.Random(seed)
        self.loss = loss
        self.t = 0.0
        self.full_every = 12
        self._rounds = 0
        self._due = [(self.rng.random() * INTERVAL_S, name) for name in sorted(self.parties)]
        heapq.heapify(self._due)

    def add(self, party: Party, *, name: str) -> None:
        """Let one more process take part, under a name of its own; its first round is due."""
        party.name = name
        self.parties[name] = party
        heapq.heappush(self._due, (self.t, name))

    def run(self, seconds: float, look: Callable[[], None] = lambda: None) -> None:
        """Let time pass; `look` is called before each round."""
        end = self.t + seconds
        while self._due and self._due[0][0] <= end:
            self.t, name = heapq.heappop(self._due)
            look()
            party = self.parties[name]
            if party.is_up:
                self._round(party)
            pause = INTERVAL_S * (0.9 + 0.2 * self.rng.random())
            heapq.heappush(self._due, (self.t + pause, name))
        self.t = end

    def _round(self, party: Party) -> None:
        party.registry.begin_round(**party.times(self.t))
        others = [p for p in self.parties.values() if p is not party]
        for peer in self.rng.sample(others, min(FANOUT, len(others))):
            if not peer.is_up or self.rng.random() < self.loss:
                continue
            self._rounds += 1
            if self._rounds % self.full_every == 0:
                exchange_in_full(party, peer, self.t)
            else:
                exchange(party, peer, self.t)

    def up(self) -> list[Party]:
        return [party for party in self.parties.values() if party.is_up]


def card_of(party: Party, name: str, t: float) -> Card | None:
    return party.registry.get(name, mono=party.times(t)["mono"])


def read(wire: bytes) -> Card:
    return from_wire(wire)
