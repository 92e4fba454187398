"""The state that a node keeps across starts, as the bytes of one file.

It has a version and a checksum, because a wrong incarnation or a wrong address is worse than none:
a file that does not read back exactly is damaged, and the start goes on without it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from kakeya.core.ids import NodeId
from kakeya.fleet.cards.cards import MAX_INCARNATION, is_dialable, is_valid_node_id
from kakeya.fleet.view.tombstones import RegistryState, Sighting

STATE_VERSION = 1


class DamagedState(ValueError):
    """The state file does not hold the bytes that were written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """The node's id, and the saved part of its registry."""

    node_id: str
    memory: RegistryState


def encode_state(state: NodeState) -> bytes:
    """Write a state with its version and the checksum of its content."""
    memory = state.memory
    fields = {
        "node_id": state.node_id,
        "incarnation": memory.incarnation,
        "stamp": memory.stamp,
        "peers": [list(sighting) for sighting in memory.peers],
    }
    content = json.dumps(fields, sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()
    return json.dumps({"version": STATE_VERSION, "sha256": digest, "state": content}).encode()


def decode_state(data: bytes) -> NodeState:
    """Read the bytes of `encode_state`. Raises DamagedState for any other bytes."""
    try:
        return _decode(data)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as problem:
        raise DamagedState(str(problem)) from problem


def _decode(data: bytes) -> NodeState:
    outer = json.loads(data)
    if not isinstance(outer, dict) or outer.get("version") != STATE_VERSION:
        raise DamagedState(f"not a state of version {STATE_VERSION}")
    content = outer.get("state")
    if not isinstance(content, str):
        raise DamagedState("no state in it")
    if hashlib.sha256(content.encode()).hexdigest() != outer.get("sha256"):
        raise DamagedState("the checksum does not match")
    fields = json.loads(content)
    memory = RegistryState(
        incarnation=int(fields["incarnation"]),
        stamp=float(fields.get("stamp", 0.0)),
        peers=tuple(map(_sighting, fields.get("peers", ()))),
    )
    state = NodeState(node_id=str(fields["node_id"]), memory=memory)
    is_countable = 0 <= memory.incarnation < MAX_INCARNATION - 1
    if not (is_valid_node_id(state.node_id) and is_countable and math.isfinite(memory.stamp)):
        raise DamagedState("values out of range")
    return state


def _sighting(fields: Sequence[object]) -> Sighting:
    node_id, address, last_seen_at = fields
    sighting = Sighting(NodeId(str(node_id)), str(address), float(str(last_seen_at)))
    is_good = is_valid_node_id(sighting.node_id) and is_dialable(sighting.address)
    if not is_good or not math.isfinite(sighting.last_seen_at):
        raise DamagedState(f"no peer: {fields!r}")
    return sighting


def next_state(previous: NodeState | None, *, node_id: str, drawn_id: str, now: float) -> NodeState:
    """Return the state of a start: the id that was configured, kept or drawn, and the last run.

    The registry begins one incarnation above the last one. Without a previous state that is the
    wall clock in seconds: an earlier run with the same id and a lost file cannot have counted
    so far.
    """
    if previous is None:
        return NodeState(
            node_id=node_id or drawn_id, memory=RegistryState(incarnation=max(0, int(now) - 1))
        )
    return NodeState(node_id=node_id or previous.node_id, memory=previous.memory)
