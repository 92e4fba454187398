"""What a ring group is: one model, the nodes of its ranks in order, and each rank's share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

from kakeya.core.errors import ConfigError, InvalidArgument
from kakeya.fleet.placement.ring import MOST_RANKS, RingSplit
from kakeya.generation.spec import ModelRole, ModelSpec, parse_model
from kakeya.v1 import ring_pb2 as pb

SPLITS = tuple(RingSplit)
_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)*\Z", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSeat:
    """One rank: its node, the bytes to lend it, and its layers in a pipeline, 0 = not given."""

    node: str
    lend_bytes: int = 0
    layers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSpec:
    """A group: `name` is the id of its model, `source` its weights as `kakeya-node --model` takes
    them, which each member finds for itself; the seats go from rank 0 on. `wish` is the id that
    its leader gave it, "" = none yet."""

    name: str
    source: str
    split: str
    seats: tuple[RingSeat, ...]
    wish: str = ""

    def check(self) -> None:
        """Raise InvalidArgument for what is no group."""
        if not _NAME.match(self.name):
            raise InvalidArgument(
                f"{self.name!r} names no group; a name has letters, digits, and . _ - /"
            )
        if self.split not in SPLITS:
            raise InvalidArgument(f"split is {self.split!r}; it is {' or '.join(SPLITS)}")
        if not 2 <= len(self.seats) <= MOST_RANKS:
            raise InvalidArgument(
                f"a group has 2 to {MOST_RANKS} ranks, and {len(self.seats)} nodes are named"
            )
        nodes = [seat.node for seat in self.seats]
        if twice := next((node for node in nodes if nodes.count(node) > 1), None):
            raise InvalidArgument(f"node {twice} is named twice; a node has one rank of a group")
        layers = [seat.layers for seat in self.seats]
        if any(layers) and (not all(layers) or self.split != RingSplit.PIPELINE):
            raise InvalidArgument(
                f"layers are {layers}; a pipeline has a number for each rank, other splits none"
            )

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of `kakeya-engine` for each rank."""
        layers = ",".join(str(seat.layers) for seat in self.seats if seat.layers)
        return ("--ring", self.split, *(("--layers", layers) if layers else ()))

    def model(self) -> ModelSpec:
        """The model as a rank's process loads it. Raises ConfigError."""
        return ModelSpec(
            model_id=self.name, source=self.source, role=ModelRole.VERIFIER, ring=self.flags
        )

    def rank_of(self, node: str) -> int | None:
        """The rank of a node; None = it is no member."""
        return next((rank for rank, seat in enumerate(self.seats) if seat.node == node), None)

    def shares(self) -> tuple[float, ...]:
        """The part of the weights at each rank."""
        total = sum(seat.layers for seat in self.seats)
        if not total:
            return (1 / len(self.seats),) * len(self.seats)
        return tuple(seat.layers / total for seat in self.seats)

    def to_json(self) -> dict[str, object]:
        """For the file of wishes."""
        return asdict(self)

    @classmethod
    def from_json(cls, said: Mapping[str, object]) -> RingSpec:
        """Read the file of wishes. Raises ConfigError."""
        try:
            spec = cls(
                name=str(said["name"]),
                source=str(said["source"]),
                split=str(said["split"]),
                seats=tuple(
                    RingSeat(**seat) for seat in cast("list[dict[str, Any]]", said["seats"])
                ),
                wish=str(said.get("wish", "")),
            )
            spec.check()
        except (KeyError, TypeError, ValueError, InvalidArgument) as fault:
            raise ConfigError(f"no ring group: {fault}") from fault
        return spec

    def to_wire(self) -> pb.RingGroupSpec:
        """The message."""
        return pb.RingGroupSpec(
            name=self.name,
            source=self.source,
            split=self.split,
            seats=[
                pb.RingSeat(node=seat.node, lend_bytes=seat.lend_bytes, layers=seat.layers)
                for seat in self.seats
            ],
            wish=self.wish,
        )

    @classmethod
    def from_wire(cls, message: pb.RingGroupSpec) -> RingSpec:
        """Read a message. Raises InvalidArgument."""
        spec = cls(
            name=message.name,
            source=message.source,
            split=message.split,
            seats=tuple(
                RingSeat(node=seat.node, lend_bytes=seat.lend_bytes, layers=seat.layers)
                for seat in message.seats
            ),
            wish=message.wish,
        )
        spec.check()
        return spec


def group_name(source: str) -> str:
    """The name of a model by its source, as of `kakeya-node --model`. Raises Illegal."""
    return parse_model(source).model_id
