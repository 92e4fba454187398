"""Find the peers of an examination by the names that people use. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kakeya.core.errors import InvalidArgument, NotFound
from kakeya.core.settings import Illegal, nearest, peer_address
from kakeya.doctor.way_checks import Peer
from kakeya.fleet.cards.cards import Card, Endpoint
from kakeya.fleet.cards.names import short_id

MAX_PEERS = 8
"""The most peers that are examined when none is named; a shelf has fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A peer to examine and the ways to it; without a card only its address is known."""

    peer: Peer
    ways: tuple[Endpoint, ...]
    card: Card | None = None


def name_of(card: Card) -> str:
    """Return the readable name of a node: its label, else the beginning of its id."""
    return card.label or short_id(card.node_id)


def ways_of(card: Card) -> tuple[Endpoint, ...]:
    """List the ways to a node, each address once, `grpc_address` of its card included."""
    ways = {way.address: way for way in card.endpoints if way.address}
    if card.grpc_address:
        ways.setdefault(card.grpc_address, Endpoint(card.grpc_address))
    return tuple(ways.values())


def find_targets(wanted: str, cards: Sequence[Card]) -> tuple[Target, ...]:
    """Find peers by a node id, the beginning of an id, a label or HOST:PORT; "" = all peers.

    At most `MAX_PEERS` are found. Raises NotFound and InvalidArgument.
    """
    if not wanted:
        return tuple(_target(card) for card in cards[:MAX_PEERS])
    for matches in (
        [card for card in cards if card.node_id == wanted],
        [card for card in cards if any(way.address == wanted for way in ways_of(card))],
        [card for card in cards if card.label.casefold() == wanted.casefold()],
        [card for card in cards if card.node_id.startswith(wanted)],
    ):
        if len(matches) > 1:
            ids = ", ".join(short_id(card.node_id) for card in matches)
            raise InvalidArgument(f"{wanted!r} names {len(matches)} nodes: {ids}; give more of one")
        if matches:
            return (_target(matches[0]),)
    return (_stranger(wanted, cards),)


def _target(card: Card) -> Target:
    peer = Peer(name=name_of(card), node_id=card.node_id, platform=card.platform)
    return Target(peer=peer, ways=ways_of(card), card=card)


def _stranger(wanted: str, cards: Sequence[Card]) -> Target:
    try:
        address = peer_address(wanted)
    except Illegal:
        near = nearest(wanted, [name_of(card) for card in cards])
        raise NotFound(
            f"no live node is called {wanted!r}{near}; give a label, a node id or its beginning "
            "(kakeya status shows them), or HOST:PORT"
        ) from None
    return Target(peer=Peer(name=address), ways=(Endpoint(address),))
