"""Nodes that hold copies of answers for each other, without a network."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from kakeya.core.clock import Clock
from kakeya.core.errors import KakeyaError, NotFound
from kakeya.dispatch.peers.held_answers import AnswerCopy, HeldAnswers
from kakeya.dispatch.peers.neighbours import LivePeer
from kakeya.dispatch.peers.wire import copy_from_wire, copy_to_wire
from kakeya.dispatch.routed.copied import AnswerCopies
from tests.fakes import FakeClock


class CopyFleet:
    """Nodes that hold copies, without a network; `fails` are the failures of the lost ones."""

    def __init__(self, *names: str, clock: Clock | None = None) -> None:
        self.clock = clock or FakeClock()
        self.held = {name: HeldAnswers(most_bytes=10**6, mono=self.clock.mono) for name in names}
        self.fails: dict[str, KakeyaError] = {}
        self.lost: set[str] = set()
        """Nodes that are known not to be there."""
        self.sent: list[tuple[str, int]] = []
        """The node, and the frames before, of each message."""
        self._made: list[AnswerCopies] = []

    def at(self, name: str) -> AnswerCopies:
        """The copies as one node sees them."""
        copies = AnswerCopies(CopyPeers(self, name), self.held[name], self.clock)  # type: ignore[arg-type]
        self._made.append(copies)
        return copies

    @property
    def is_sending(self) -> bool:
        """Whether tokens are on their way."""
        return any(copies._sending for copies in self._made)


@dataclass
class CopyPeers:
    fleet: CopyFleet
    own: str
    failures: list[str] = field(default_factory=list)

    @property
    def own_id(self) -> str:
        return self.own

    def is_live(self, node_id: str) -> bool:
        return node_id not in self.fleet.lost

    def live(self) -> Sequence[LivePeer]:
        return [
            LivePeer(
                node_id=name,
                label=name,
                life=1,
                address=name,
                is_suspect=False,
            )
            for name in self.fleet.held
            if name != self.own
        ]

    def calls(self, peer: LivePeer) -> _Calls:
        return _Calls(self.fleet, peer.node_id)

    def failed(self, peer: LivePeer, failure: KakeyaError) -> None:
        self.failures.append(peer.node_id)


@dataclass
class _Calls:
    fleet: CopyFleet
    name: str

    async def hold_answer(self, copy: AnswerCopy, before: int) -> None:
        self.fleet.sent.append((self.name, before))
        await asyncio.sleep(0)
        if self.name in self.fleet.fails:
            raise self.fleet.fails[self.name]
        self.fleet.held[self.name].hold(copy_to_wire(copy, before), before)

    async def find_answer(self, answer_id: str, client: str, *, forget: bool) -> AnswerCopy:
        if self.name in self.fleet.fails:
            raise self.fleet.fails[self.name]
        found = self.fleet.held[self.name].find(answer_id, client)
        if found is None:
            raise NotFound("it is not here")
        if forget:
            self.fleet.held[self.name].forget(answer_id, client)
        return copy_from_wire(found)
