"""Finds out whether another process answers under this node's id, and gives way to it.

A member that heard old cards and beats of an earlier life can replay them, and they would look like
a second owner. An answer cannot be replayed: in a fleet with identities the answering process must
hold this node's own key.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from kakeya.core.clock import Clock
from kakeya.core.errors import Conflict, KakeyaError
from kakeya.core.log import event
from kakeya.fleet.cards.cards import Card
from kakeya.fleet.cards.convert import MalformedCard, from_wire
from kakeya.fleet.gossip.describe import ask_card
from kakeya.fleet.gossip.messages import Digest, decode_answer, encode_digest
from kakeya.fleet.gossip.round import SYNC_METHOD
from kakeya.fleet.identity.membership import FleetSecurity
from kakeya.fleet.identity.trust import FleetTrust
from kakeya.fleet.view.beats import no_beats
from kakeya.fleet.view.registry import CapabilityRegistry
from kakeya.wire.calls import call_bytes
from kakeya.wire.channels import Channels, is_local
from kakeya.wire.server.health import NodeHealth

_log = logging.getLogger(__name__)
_LIMIT_S = 2.0
_ASK_S = 1.0
"""Patience of a start with its peers: a peer that is there answers in milliseconds."""
_TAKEN = "conflict"
"""The reason under which the node's services are switched off."""


async def answers_as(
    own: Card,
    address: str,
    trust: FleetTrust | None,
    *,
    is_plain: Callable[[str], bool] = is_local,
) -> bool:
    """Ask at an address whether a node with the id of `own` and another life serves there."""
    security = FleetSecurity(trust, lambda _: own.node_id) if trust else None
    channels = Channels(security=security, is_plain=is_plain)
    try:
        found = await ask_card(channels.get(address), address, timeout_s=_LIMIT_S)
    except KakeyaError:
        return False
    finally:
        await channels.aclose()
    return found.node_id == own.node_id and found.life != own.life and not found.is_leaving


async def refuse_taken_id(
    registry: CapabilityRegistry,
    peers: Sequence[str],
    *,
    channels: Channels,
    trust: FleetTrust | None,
    clock: Clock,
    why_not_dial: Callable[[str], str],
) -> None:
    """Find out, before any node hears of this one, whether another process serves under its id.

    Asks `peers` for their cards, and then the address on each card with the own id. Peers that do
    not answer within a second say nothing. Raises Conflict.
    """
    tellings = (_cards_at(address, channels, clock) for address in peers)
    own, now = registry.own, clock.wall()
    rivals: dict[str, None] = {}
    for card in [card for cards in await asyncio.gather(*tellings) for card in cards]:
        is_rival = card.node_id == own.node_id and not card.is_leaving
        if is_rival and (trust is None or trust.fault_of(card, now) is None):
            rivals.update(dict.fromkeys(card.addresses))
    for address in rivals:
        if address in registry.own_addresses or why_not_dial(address):
            continue
        if await answers_as(own, address, trust):
            raise Conflict(
                f"the node at {address} serves under this node's id ({own.node_id}): this data "
                "directory is a copy, or both were given one --node-id. Stop the other node, or "
                "give this one an empty --data-dir and an id of its own"
            )


async def _cards_at(address: str, channels: Channels, clock: Clock) -> list[Card]:
    """Every card that a peer holds; none if it does not answer."""
    digest = Digest(held=no_beats(), sent_at=clock.wall())
    try:
        answer = await call_bytes(
            channels.get(address), address, SYNC_METHOD, encode_digest(digest), timeout_s=_ASK_S
        )
        return [from_wire(wire) for wire in decode_answer(answer).cards]
    except (KakeyaError, MalformedCard):
        return []


class DuplicateIdWatch:
    """Watches for another node with this id; while one that came first answers, this one has left
    the fleet and serves nothing.

    `poke` asks for a round soon. Used on the event loop only.
    """

    def __init__(
        self,
        registry: CapabilityRegistry,
        trust: FleetTrust | None,
        health: NodeHealth,
        *,
        clock: Clock,
        why_not_dial: Callable[[str], str],
        poke: Callable[[], None],
    ) -> None:
        self._registry = registry
        self._trust = trust
        self._health = health
        self._clock = clock
        self._why_not_dial = why_not_dial
        self._poke = poke
        self._confirming: asyncio.Task[None] | None = None
        self._has_given_way = False

    def look(self) -> None:
        """After a round: give way, or serve again when no other process was seen for a while."""
        taken = [one for one in self._registry.conflicts(self._clock.wall()) if one.is_own]
        first = [one.address for one in taken if one.is_first]
        if self._has_given_way and not taken:
            self._come_back()
        is_asking = self._confirming is not None and not self._confirming.done()
        if first and not self._has_given_way and not is_asking:
            self._confirming = asyncio.create_task(self._give_way(first))

    def cancel(self) -> None:
        """Stop asking: the node stops."""
        if self._confirming is not None:
            self._confirming.cancel()

    async def _give_way(self, addresses: Sequence[str]) -> None:
        """Leave and serve nothing if another process really answers under this id."""
        own = self._registry.own
        for address in addresses:
            if self._why_not_dial(address) or not await answers_as(own, address, self._trust):
                continue
            reason = (
                f"the node at {address} had the id {own.node_id} before this one; stop one of "
                "them and give it an id and a data directory of its own"
            )
            self._has_given_way = True
            self._registry.give_way(now=self._clock.wall(), mono=self._clock.mono())
            self._health.hold(_TAKEN, reason)
            self._poke()
            event(_log, "gives way and serves nothing", level=logging.ERROR, reason=reason)
            return

    def _come_back(self) -> None:
        self._has_given_way = False
        self._registry.come_back(now=self._clock.wall(), mono=self._clock.mono())
        self._health.release(_TAKEN)
        self._poke()
        event(_log, "serves again: the other node with its id is gone")
