"""`kakeya version`: of this program, of the node that runs here, and of the nodes of its fleet."""

from __future__ import annotations

import argparse
import json
import os
import platform
from typing import TypeVar

import kakeya
from kakeya.cli.data_dir import add_data_dir, data_dir_of
from kakeya.cli.node_api import KEY_VARIABLE, NodeApi, find_node
from kakeya.cli.show.labels import NodeLabels
from kakeya.core.errors import KakeyaError, PeerUnavailable

Parser = TypeVar("Parser", bound=argparse.ArgumentParser)
_TEXT = "show the versions of this program, of the node here, and of its fleet"
_PEERS_S = 3.0


def add_parsers(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command to those of `kakeya`."""
    version = commands.add_parser("version", help=_TEXT, description=_TEXT, allow_abbrev=False)
    version.add_argument("--node", default="", metavar="HOST:PORT", help="HTTP address of a node")
    add_data_dir(version)
    version.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int | None:
    """Run the command and return its exit status; None for any other. Raises KakeyaError."""
    if options.command != "version":
        return None
    told: dict[str, object] = {"program": kakeya.__version__, "python": platform.python_version()}
    key = os.environ.get(KEY_VARIABLE, "")
    try:
        nodes = versions_of(find_node(options.node, data_dir_of(options), key))
    except PeerUnavailable:
        if options.node:
            raise
        nodes = {}
    if options.json:
        print(json.dumps({**told, "nodes": nodes}))
        return 0
    print(f"kakeya {told['program']}, Python {told['python']}")
    for name, version in nodes.items():
        other = "" if version == told["program"] else "; not that of this program"
        print(f"{name:<20} {version}{other if version != _UNKNOWN else ''}")
    return 0


_UNKNOWN = "unknown: an older version, or it does not answer"


def versions_of(node: NodeApi) -> dict[str, str]:
    """The version of each node that a node knows, by label, its own first. Raises KakeyaError."""
    status = node.get("/api/v1/status")
    own, fleet = status.get("node"), status.get("fleet")
    if not isinstance(own, dict) or not isinstance(fleet, dict):
        raise KakeyaError(f"{node.address} tells no status; is it a Kakeya node?")
    found: dict[str, str] = {str(own["node_id"]): str(own.get("version") or _UNKNOWN)}
    labels = NodeLabels({str(one["node_id"]): str(one["label"]) for one in fleet["nodes"]})
    wanted = {str(one["node_id"]) for one in fleet["nodes"]}
    if len(wanted) > 1:
        for facts in node.facts(_PEERS_S):
            told = {
                name: one["node"]["version"]
                for name, one in facts.items()
                if "version" in (one.get("node") or {})
            }
            found |= told
            if wanted <= found.keys():
                break
    return {
        labels.apart(name): found.get(name, _UNKNOWN)
        for name in sorted(wanted, key=lambda name: (name != own["node_id"], labels.of(name)))
    }
