"""Who a node is in this start: a member of a fleet, or a name of its own; its last life and the
next one.
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

    Raises ConfigError for a damaged key, and what joining raises.
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
    """Return what this start goes on from."""
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
    """Return what the next start goes on from."""
    memory = registry.memory(now=clock.wall(), mono=clock.mono())
    # When a peer was last seen matters to the hour; to the second it would wear the disk.
    peers = tuple(
        peer._replace(last_seen_at=peer.last_seen_at // _SEEN_S * _SEEN_S) for peer in memory.peers
    )
    return NodeState(node_id=node_id, memory=replace(memory, peers=peers))


def tell_command_line(home: DataDir, run: RunInfo) -> None:
    """Write where the node is, for the commands of its owner."""
    try:
        home.write_run(run)
    except OSError as problem:
        # The node itself needs no disk, so a full one is no reason not to serve.
        event(
            _log,
            "addresses not saved; the command line cannot find this node",
            level=logging.WARNING,
            problem=problem,
        )
