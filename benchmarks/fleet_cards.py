"""Cards as a fleet of minis would send them, for the benchmarks of merge, exchange and payload."""

from __future__ import annotations

from kakeya.core.ids import ModelId
from kakeya.core.units import GIB
from kakeya.fleet.cards import Offer, OfferedModel, Role
from kakeya.fleet.convert import to_wire
from kakeya.fleet.registry import CapabilityRegistry

NOW = 1_700_000_000.0
MODELS = (
    OfferedModel(ModelId("Qwen3-1.7B-4bit"), Role.VERIFIER, "4bit", 61.5),
    OfferedModel(ModelId("kakeya-tiny-draft"), Role.PROPOSER, "", 410.0),
    OfferedModel(ModelId("ngram"), Role.PROPOSER),
)


def fleet_cards(count: int, at: float = NOW) -> list[bytes]:
    """The cards of `count` nodes, each with three models and its own address."""
    return [
        to_wire(
            f"mini-{index:04d}",
            Offer(
                grpc_address=f"192.168.{index // 250}.{index % 250 + 1}:50051",
                platform="mac-m4-24gb",
                unified_memory_bytes=24 * GIB,
                mlx_version="0.32.4",
                models=MODELS,
            ),
            incarnation=3,
            announced_at=at + index * 0.001,
        )
        for index in range(count)
    ]


def registry(node_id: str = "bench", at: float = NOW) -> CapabilityRegistry:
    """A registry that knows only itself."""
    return CapabilityRegistry(node_id, Offer(grpc_address="127.0.0.1:1"), now=at, mono=0.0)
