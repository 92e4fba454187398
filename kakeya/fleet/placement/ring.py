"""The optional mlx.distributed ring: whether this process is in one, whether two nodes share one.

`mlx.launch` describes the ring in the environment: MLX_RANK, and a file with one entry per rank,
the same on every rank (MLX_HOSTFILE for the TCP ring, MLX_IBV_DEVICES for Thunderbolt RDMA); other
backends set MLX_WORLD_SIZE. Outside of a launch mlx still hands out a group, of size one: that is
no ring. This module imports no mlx; a caller that does passes `init`, which checks the claim.

A ring is named by a digest of that file, so two launches on one desk are told apart. It rides
in the host part of the advertised address, `HOST+RING:RANK`, which keeps the wire's form
`hostname:rank`. Without a ring name on either side (older nodes) one launch per fleet is assumed.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from kakeya.core.figures import Json
from kakeya.fleet.cards.cards import Card
from kakeya.fleet.cards.ring_offer import RingOffer

MOST_RANKS = 32
_RING_NAME_CHARS = 12
_BACKEND_BY_FILE = {"MLX_HOSTFILE": "ring", "MLX_IBV_DEVICES": "jaccl"}
"""Files with one JSON entry per rank, the same on every rank, and the backend that reads each."""


class RingSplit(StrEnum):
    """How a network lies on the ranks of a group."""

    TENSOR = "tensor"
    PIPELINE = "pipeline"


class RingGroup(Protocol):
    """The return value of `mlx.core.distributed.init`."""

    def rank(self) -> int:
        """The rank of this process, from 0."""
        ...

    def size(self) -> int:
        """Count of processes in the group."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RingEnvironment:
    """The result of the probe. `failure_reason` is "" exactly when the ring is available.

    Without a ring `world_size` is 0. Otherwise than in the original engine, a group of one is no
    ring, and a ring has a name.
    """

    is_available: bool
    rank: int = 0
    world_size: int = 0
    backend: str = ""
    ring_name: str = ""
    leader_host: str = ""
    """An address of rank 0's machine, as the launch names it."""
    failure_reason: str = ""

    def render(self) -> str:
        """One line for the operator."""
        if not self.is_available:
            return f"no mlx ring: {self.failure_reason}"
        name = f" {self.ring_name}" if self.ring_name else ""
        return f"mlx ring{name}: rank {self.rank} of {self.world_size} ({self.backend})"

    def ring_address(self, hostname: str = "") -> str:
        """The ring address to advertise; "" without a ring."""
        return seat_address(self.ring_name, self.rank, hostname) if self.is_available else ""


def ring_name(hosts: str) -> str:
    """The name of a ring by the content of its file of hosts."""
    return hashlib.sha256(hosts.encode()).hexdigest()[:_RING_NAME_CHARS]


def seat_address(ring_name: str, rank: int, hostname: str = "") -> str:
    """The address of a rank; the host is this one, where none is given."""
    host = (hostname or socket.gethostname()).replace(":", "-").replace("+", "-")
    ring = f"+{ring_name}" if ring_name else ""
    return f"{host}{ring}:{rank}"


def probe_ring_environment(
    environ: Mapping[str, str] | None = None, *, init: Callable[[], RingGroup] | None = None
) -> RingEnvironment:
    """Tell whether this process runs in a ring of two or more. Never raises.

    `init` joins the ring and is called only when the environment describes one; it may block
    until the other ranks are there.
    """
    environ = os.environ if environ is None else environ
    try:
        return _probe(environ, init)
    except Exception as failure:  # noqa: BLE001 - whatever init or the file does is the finding
        return _unavailable(f"the ring could not be joined: {failure}")


def _probe(environ: Mapping[str, str], init: Callable[[], RingGroup] | None) -> RingEnvironment:
    rank_text = environ.get("MLX_RANK", "")
    if not rank_text:
        return _unavailable("not started by mlx.launch: MLX_RANK is not set")
    if not rank_text.isdecimal():
        return _unavailable(f"MLX_RANK is {rank_text!r}, which is no rank")
    rank = int(rank_text)
    backend, path = next(
        ((kind, environ[name]) for name, kind in _BACKEND_BY_FILE.items() if environ.get(name)),
        ("any", ""),
    )
    leader = environ.get("MLX_JACCL_COORDINATOR", "")
    if path:
        text = Path(path).read_text(encoding="utf-8")
        entries = json.loads(text) if text.strip() else [""]
        world_size = len(entries)
        if backend == "ring" and entries[0]:
            leader = str(entries[0][0])
        name = ring_name(text)
    else:
        world_size, name = int(environ.get("MLX_WORLD_SIZE", "1")), ""
    if init is not None:
        group = init()
        rank, world_size = group.rank(), group.size()
    if world_size < 2:
        return _unavailable(
            f"a group of {world_size} is no ring; mlx.launch needs two or more hosts"
        )
    if rank >= world_size:
        return _unavailable(f"rank {rank} lies outside of a ring of {world_size}")
    return RingEnvironment(
        is_available=True,
        rank=rank,
        world_size=world_size,
        backend=backend,
        ring_name=name,
        leader_host=leader.rpartition(":")[0].strip("[]"),
    )


def _unavailable(reason: str) -> RingEnvironment:
    return RingEnvironment(is_available=False, failure_reason=reason)


@dataclass(frozen=True, slots=True)
class _Seat:
    ring_name: str
    rank: int


def ring_path_available(a: str, b: str) -> bool:
    """Whether two advertised ring addresses are different seats of the same ring.

    The original engine takes two cards, and any two addresses for one ring.
    Both must read `HOST:RANK` or `HOST+RING:RANK`, with equal ring names and unequal ranks.
    """
    here, there = _read_seat(a), _read_seat(b)
    if here is None or there is None:
        return False
    return here.ring_name == there.ring_name and here.rank != there.rank


def _read_seat(address: str) -> _Seat | None:
    host, _, rank = address.rpartition(":")
    hostname, _, ring_name = host.partition("+")
    if not hostname or not rank.isdecimal():
        return None
    return _Seat(ring_name, int(rank))


def describe_groups(cards: Sequence[Card]) -> list[Json]:
    """The ring groups that cards tell of, by the model: the nodes of each, from rank 0 on, None
    for a rank of which no card tells."""
    found: dict[str, tuple[RingOffer, dict[int, str]]] = {}
    for card in cards:
        if card.ring is not None:
            _, nodes = found.setdefault(card.ring.group_id, (card.ring, {}))
            nodes[card.ring.rank] = card.label or card.node_id
    return [
        {
            "id": seat.group_id,
            "model_id": seat.model_id,
            "backend": seat.backend,
            "split": seat.split,
            "nodes": [nodes.get(rank) for rank in range(min(seat.ranks, MOST_RANKS))],
        }
        for seat, nodes in sorted(found.values(), key=lambda one: (one[0].model_id, one[0]))
    ]
