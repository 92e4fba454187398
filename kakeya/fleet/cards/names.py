"""Names of nodes for people and for figures: labels, as long as they tell the nodes apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from kakeya.fleet.cards.cards import Card

_LONGEST_ID = 40
"""An id made from a key has 52 characters; those that people choose are whole."""
_ID_START = 8
"""Characters of an id made from a key that tell nodes apart."""


def short_id(node_id: str) -> str:
    """The start of an id made from a key; any other id whole."""
    return node_id if len(node_id) <= _LONGEST_ID else node_id[:_ID_START]


def names_of(cards: Iterable[Card]) -> dict[str, str]:
    """The names of nodes by id: see `told_apart`."""
    return told_apart({card.node_id: card.label or card.node_id for card in cards})


def told_apart(labels: Mapping[str, str]) -> dict[str, str]:
    """Names by id, each of one node: their labels, and those of one label with the start of their
    ids."""
    alike = Counter(labels.values())
    names = {
        node_id: label if alike[label] == 1 else f"{label} ({node_id[:_ID_START]})"
        for node_id, label in labels.items()
    }
    alike = Counter(names.values())
    return {
        node_id: name if alike[name] == 1 and (name not in names or name == node_id) else node_id
        for node_id, name in names.items()
    }
