"""The identity of a node at a start, a fleet's or its own; the state of the last run and of the
next.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import replace

from kakeya.config.config import NodeConfig
from kakeya.core.clock import Clock
from kakeya.core.host import draw_node_id, host_label
from kakeya.core.log import event
from kakeya.fleet.identity.certificates import is_key_id
from kakeya.fleet.identity.identity import FOLDER, Identity, load_identity
from kakeya.fleet.identity.join_client import join
from kakeya.fleet.view.registry import CapabilityRegistry
from kakeya.node.datadir import DataDir, RunInfo
from kakeya.node.state import NodeState, next_state

_log = logging.getLogger(__name__)
_SEEN_S = 1800.0


async def become_member(config: NodeConfig, clock: Clock) -> Identity | None:
    """Return the identity in the data directory, after joining if a token was given.

    Raises ConfigError for a damaged key, and the errors of joining.
    """
    if not config.fleet.join:
        return await asyncio.to_thread(load_identity, config.data_dir)
    label = config.label or host_label()
    joined = await join(config.data_dir, config.fleet.join, label, clock=clock)
    event(
        _log,
        "joined" if joined.is_new else "is a member already; the token was not needed",
        fleet=joined.identity.fleet,
        node_id=joined.identity.node_id,
    )
    return joined.identity


async def begin(
    home: DataDir,
    config: NodeConfig,
    identity: Identity | None,
    *,
    clock: Clock,
    rng: random.Random,
) -> NodeState:
    """Return the state from which this start goes on."""
    if identity is not None and config.node_id not in ("", identity.node_id):
        event(
            _log,
            "--node-id has no effect on a member of a fleet, whose id is its key's; --label names "
            "it for people",
            level=logging.WARNING,
        )
    previous = await asyncio.to_thread(home.load_state)
    if identity is None and previous is not None and is_key_id(previous.node_id):
        event(
            _log,
            f"this node was a member of a fleet, and {home.folder / FOLDER} is gone: it is alone "
            "now, under a name of its own; restore the folder, or join anew with `kakeya join "
            "TOKEN`",
            level=logging.WARNING,
            was=previous.node_id,
        )
        previous = None
    return next_state(
        previous,
        node_id=identity.node_id if identity else config.node_id,
        drawn_id=draw_node_id(rng),
        now=clock.wall(),
    )


def to_remember(registry: CapabilityRegistry, node_id: str, clock: Clock) -> NodeState:
    """Return the state from which the next start goes on."""
    memory = registry.memory(now=clock.wall(), mono=clock.mono())
    # The time of a peer's last card needs one hour's precision; seconds would wear the disk.
    peers = tuple(
        peer._replace(last_seen_at=peer.last_seen_at // _SEEN_S * _SEEN_S) for peer in memory.peers
    )
    return NodeState(node_id=node_id, memory=replace(memory, peers=peers))


def tell_command_line(home: DataDir, run: RunInfo) -> None:
    """Write the node's addresses for the commands of its owner."""
    try:
        home.write_run(run)
    except OSError as problem:
        # The node itself needs no disk, so it also serves with a full one.
        event(
            _log,
            "addresses not saved; the command line cannot find this node",
            level=logging.WARNING,
            problem=problem,
        )
