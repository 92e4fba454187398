"""`kakeya config`: what of a node's settings changes while it runs, and the file read again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from kakeya.cli.node_api import NodeApi

_CONFIG = "/api/v1/config"
_USUAL = {"resumable": True}
"""Values that say nothing, beside empty ones."""


def run(node: NodeApi, action: Literal["show", "reload"], *, as_json: bool) -> int:
    """Run one command and return its exit status. Raises the errors of `NodeApi`."""
    found = node.get(_CONFIG) if action == "show" else node.put(_CONFIG, {"reload": True})
    print(json.dumps(found) if as_json else "\n".join(config_lines(found)))
    return 0


def config_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines for a person: a table of the file each, with the keys that say something."""
    for section in ("models", "tasks", "profiles"):
        for name, table in found[section].items():
            said = (
                f"{key} {_value(value)}"
                for key, value in table.items()
                if (value is not _USUAL[key] if key in _USUAL else value)
            )
            yield f"{section}.{name}: {', '.join(said) or 'nothing'}"
    yield f"clouds as fallbacks: {'yes' if found['allowCloudFallback'] else 'no'}"
    if stale := found["needs_restart"]:
        yield f"not before a restart: {', '.join(stale)}"


def _value(value: object) -> str:
    if isinstance(value, list):
        return " ".join("=".join(one) if isinstance(one, list) else str(one) for one in value)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)
