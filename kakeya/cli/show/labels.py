"""Labels of nodes in the place of their ids: an id made from a key has 52 characters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kakeya.cli.node_api import NodeApi
from kakeya.core.errors import KakeyaError
from kakeya.fleet.cards.names import short_id, told_apart

_KEY_ID = re.compile(r"\b[a-z2-7]{52}\b")


@dataclass(frozen=True, slots=True)
class NodeLabels:
    """The labels of nodes by id."""

    by_id: Mapping[str, str] = field(default_factory=dict)

    def of(self, node_id: str) -> str:
        """The label of a node, or else the start of an id made from a key, or else the id."""
        return self.by_id.get(node_id, "") or short_id(node_id)

    def apart(self, node_id: str) -> str:
        """`of`, and of nodes with one label the id behind it."""
        labelled = {of: label for of, label in self.by_id.items() if label}
        return told_apart(labelled).get(node_id) or self.of(node_id)

    def within(self, text: str) -> str:
        """A text with labels in the place of ids made from keys."""
        return _KEY_ID.sub(lambda found: self.of(found[0]), text)


def labels_in(nodes: Iterable[object]) -> NodeLabels:
    """The labels that a status tells of the nodes of its fleet."""
    found = (node for node in nodes if isinstance(node, Mapping))
    return NodeLabels({str(one.get("node_id")): str(one.get("label") or "") for one in found})


def labels_of(node: NodeApi) -> NodeLabels:
    """The labels of the fleet of a node; none where it does not tell them."""
    try:
        nodes = node.get("/api/v1/fleet").get("nodes")
    except KakeyaError:
        return NodeLabels()
    return labels_in(nodes if isinstance(nodes, list) else ())
