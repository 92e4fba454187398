"""Finds the node that an operator names: by an id, the beginning of an id, or a label."""

from __future__ import annotations

from collections.abc import Sequence

from kakeya.core.errors import InvalidArgument, NotFound
from kakeya.fleet.cards.cards import Card
from kakeya.fleet.identity.certificates import is_key_id

MIN_PREFIX = 4


def find_node(named: str, cards: Sequence[Card]) -> str:
    """Return the id of the named node; whole ids need no card.

    Each node chooses its own label, so a label that looks like the id of another node, or its
    beginning, never takes that node's place. Raises NotFound, and InvalidArgument when several
    nodes match.
    """
    if is_key_id(named):
        return named
    found = sorted({card.node_id for card in cards if _is_meant(named, card)})
    if len(found) == 1:
        return found[0]
    if found:
        raise InvalidArgument(
            f"{named!r} means {len(found)} nodes: {', '.join(found)}; give more of the id"
        )
    known = ", ".join(f"{card.label or '-'} ({card.node_id[:8]})" for card in cards)
    raise NotFound(
        f"no live node is called {named!r}; known are {known or 'none'}. A node that is away is "
        "named by its whole id"
    )


def _is_meant(named: str, card: Card) -> bool:
    is_prefix = len(named) >= MIN_PREFIX and card.node_id.startswith(named.lower())
    return is_prefix or named == card.label
