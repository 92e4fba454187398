"""Cards as a fleet of minis would send them, for the benchmarks of merge, exchange and payload."""

from __future__ import annotations

from collections.abc import Sequence

from kakeya.core.ids import ModelId
from kakeya.core.units import GIB
from kakeya.fleet.cards.cards import Card, CardFault, CardRole, Offer, OfferedModel
from kakeya.fleet.cards.convert import to_wire
from kakeya.fleet.view.registry import CapabilityRegistry

NOW = 1_700_000_000.0
MODELS = (
    OfferedModel(ModelId("Qwen3-1.7B-4bit"), CardRole.VERIFIER, "4bit", 61.5),
    OfferedModel(ModelId("kakeya-tiny-draft"), CardRole.PROPOSER, "", 410.0),
    OfferedModel(ModelId("ngram"), CardRole.PROPOSER),
)
CERTIFICATE_BYTES = 600
"""What a P-256 certificate and a signature add to a card."""
_SEAL = b"\xf2\x06\xd4\x04" + bytes(CERTIFICATE_BYTES - 4)  # field 110 of 596 bytes


class PaddedTrust:
    """Cards grow as if they were signed, so that bytes count; nothing is verified."""

    def seal(self, body: bytes) -> bytes:
        """Append as many bytes as a certificate and a signature have."""
        return body + _SEAL

    def fault_of(self, card: Card, now: float) -> CardFault | None:
        """Believe everybody."""
        return None

    def warm(self, wires: Sequence[bytes]) -> None:
        """Nothing to verify."""


def fleet_offer(index: int) -> Offer:
    """What one mini offers: three models, at its own address."""
    return Offer(
        grpc_address=f"192.168.{index // 250}.{index % 250 + 1}:50051",
        platform="mac-m4-24gb",
        unified_memory_bytes=24 * GIB,
        mlx_version="0.32.4",
        models=MODELS,
    )


def fleet_cards(count: int, at: float = NOW) -> list[bytes]:
    """The cards of `count` nodes, each with three models and its own address."""
    return [
        to_wire(
            f"mini-{index:04d}", fleet_offer(index), incarnation=3, announced_at=at + index * 0.001
        )
        for index in range(count)
    ]


def registry(node_id: str = "bench", at: float = NOW) -> CapabilityRegistry:
    """A registry that knows only itself."""
    return CapabilityRegistry(node_id, Offer(grpc_address="127.0.0.1:1"), now=at, mono=0.0)
