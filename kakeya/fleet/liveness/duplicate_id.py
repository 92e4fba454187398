"""Finds out whether another process answers under this node's id, and gives way to it.

A member that heard old cards and beats of an earlier life can replay them, and they would look like
a second owner. An answer cannot be replayed: in a fleet with identities the answering process must
hold this node's own key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kakeya.core.clock import Clock
from kakeya.core.errors import KakeyaError
from kakeya.fleet.cards.cards import Card
from kakeya.fleet.gossip.describe import ask_card
from kakeya.fleet.identity.membership import FleetSecurity
from kakeya.fleet.identity.trust import FleetTrust
from kakeya.fleet.view.merging import LATENCY_S
from kakeya.fleet.view.registry import CapabilityRegistry
from kakeya.wire.channels import Channels, is_local
from kakeya.wire.server.health import NodeHealth

_LIMIT_S = 2.0
_TAKEN = "conflict"
"""The reason under which the node's services are switched off."""
_NEWCOMER_ROUNDS = 3
"""A node that meets its own id in the time of its first rounds came second."""


async def answers_as(
    own: Card,
    address: str,
    trust: FleetTrust | None,
    *,
    is_plain: Callable[[str], bool] = is_local,
) -> bool:
    """Ask at an address whether a node with the id of `own` and another life is there."""
    security = FleetSecurity(trust, lambda _: own.node_id) if trust else None
    channels = Channels(security=security, is_plain=is_plain)
    try:
        found = await ask_card(channels.get(address), address, timeout_s=_LIMIT_S)
    except KakeyaError:
        return False
    finally:
        await channels.aclose()
    return found.node_id == own.node_id and found.life != own.life


class DuplicateIdWatch:
    """Watches for another node with this id; while one that came first answers, nothing is served.

    `interval_s` is that of the rounds, `started_mono` the start of this node. Used on the event
    loop only.
    """

    def __init__(
        self,
        registry: CapabilityRegistry,
        trust: FleetTrust | None,
        health: NodeHealth,
        *,
        clock: Clock,
        started_mono: float,
        interval_s: float,
        why_not_dial: Callable[[str], str],
    ) -> None:
        self._registry = registry
        self._trust = trust
        self._health = health
        self._clock = clock
        # By time: pokes make rounds come early, and an earlier life is told from another process
        # only by a beat from well after the start.
        self._newcomer_until_mono = started_mono + _NEWCOMER_ROUNDS * interval_s + LATENCY_S
        self._why_not_dial = why_not_dial
        self._confirming: asyncio.Task[None] | None = None

    def look(self) -> None:
        """After a round: give way, or serve again when no other process was seen for a while."""
        taken = [one for one in self._registry.conflicts(self._clock.wall()) if one.is_own]
        if not taken:
            self._health.release(_TAKEN)
        elif self._clock.mono() <= self._newcomer_until_mono and self._confirming is None:
            self._confirming = asyncio.create_task(self._give_way(taken[0].address))

    def cancel(self) -> None:
        """Stop asking: the node stops."""
        if self._confirming is not None:
            self._confirming.cancel()

    async def _give_way(self, address: str) -> None:
        """Serve nothing if another process really answers under this id: it came first."""
        if self._why_not_dial(address):
            return
        own = self._registry.own
        if await answers_as(own, address, self._trust):
            self._health.hold(
                _TAKEN,
                f"the node at {address} had the id {own.node_id} before this one; stop one of "
                "them and give it an id and a data directory of its own",
            )
