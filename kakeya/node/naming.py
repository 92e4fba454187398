"""Which node a person means: an id, the beginning of one, or a label."""

from __future__ import annotations

from collections.abc import Sequence

from kakeya.core.errors import InvalidArgument, NotFound
from kakeya.fleet.cards import Card
from kakeya.fleet.certificates import Untrusted, read_id

MIN_PREFIX = 4


def find_node(named: str, cards: Sequence[Card]) -> str:
    """Return the id of the node that is meant; whole ids need no card.

    Raises NotFound, and InvalidArgument when several nodes are meant.
    """
    found = _matches(named, cards)
    if len(found) == 1:
        return found[0]
    if found:
        raise InvalidArgument(
            f"{named!r} means {len(found)} nodes: {', '.join(found)}; give more of the id"
        )
    if _is_id(named):
        return named
    known = ", ".join(f"{card.label or '-'} ({card.node_id[:8]})" for card in cards)
    raise NotFound(
        f"no live node is called {named!r}; known are {known or 'none'}. A node that is away is "
        "named by its whole id"
    )


def _matches(named: str, cards: Sequence[Card]) -> list[str]:
    exact = [card.node_id for card in cards if named in (card.node_id, card.label)]
    if exact or len(named) < MIN_PREFIX:
        return sorted(set(exact))
    return sorted({card.node_id for card in cards if card.node_id.startswith(named.lower())})


def _is_id(named: str) -> bool:
    try:
        read_id(named)
    except Untrusted:
        return False
    return True
