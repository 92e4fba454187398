"""Which node a person means: an id, the beginning of one, or a label."""

from __future__ import annotations

from collections.abc import Sequence

from kakeya.core.errors import InvalidArgument, NotFound
from kakeya.fleet.cards.cards import Card
from kakeya.fleet.identity.certificates import is_key_id

MIN_PREFIX = 4


def find_node(named: str, cards: Sequence[Card]) -> str:
    """Return the id of the node that is meant; whole ids need no card.

    Labels are what nodes say of themselves, so one that looks like the id of another node, or the
    beginning of it, never takes its place. Raises NotFound, and InvalidArgument when several nodes
    are meant.
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
