"""Merging 1000 cards, all known and all new, against one typed parse and dataclass copy of them.

.venv/bin/python -m benchmarks.registry_merge
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.fleet_cards import NOW, fleet_cards, registry
from benchmarks.report import emit, interleaved, median
from kakeya.fleet.cards.convert import join_cards, split_cards
from kakeya.fleet.view.registry import CapabilityRegistry
from kakeya.v1 import distributed_pb2 as pb

COUNT = 1000
REPEATS = 15


@dataclass(frozen=True)
class _Model:
    model_id: str
    role: int
    quantization: str
    tokens_per_second: float


@dataclass(frozen=True)
class _Card:
    node_id: str
    grpc_address: str
    platform: str
    unified_memory_bytes: int
    mlx_version: str
    models: tuple[_Model, ...]
    announced_at: float
    ttl_s: float


def _copy(message: pb.NodeCapability) -> _Card:
    return _Card(
        message.node_id,
        message.grpc_address,
        message.platform,
        message.unified_memory_bytes,
        message.mlx_version,
        tuple(
            _Model(m.model_id, m.role, m.quantization, m.tokens_per_second) for m in message.models
        ),
        message.announced_at_unix,
        message.ttl_seconds,
    )


def _ms(work: Callable[[], object]) -> float:
    gc.collect()
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e3


def _merge_ms(known: CapabilityRegistry, message: bytes) -> float:
    received = split_cards(message)  # fresh objects, as from a socket: no hash of them is cached
    return _ms(lambda: known.merge(received, now=NOW, mono=0.0))


def main() -> None:
    wires = fleet_cards(COUNT)
    message = join_cards(wires)
    full = registry()
    full.merge(wires, now=NOW, mono=0.0)

    def typed_copy() -> object:
        batch = pb.ExchangeCapabilitiesRequest.FromString(message)
        return {card.node_id: _copy(card) for card in batch.known_nodes}

    taken = interleaved(
        {
            "unchanged": lambda: _merge_ms(full, message),
            "new": lambda: _merge_ms(registry(), message),
            "copy": lambda: _ms(typed_copy),
        },
        REPEATS,
    )
    copy_ms = median(taken["copy"])
    for name, limit_ms in (("unchanged", 1.0), ("new", 12.0)):
        ours_ms = median(taken[name])
        emit(
            f"merge of {COUNT} {name} cards, ms",
            ours=ours_ms,
            baseline=copy_ms,
            ratio=ours_ms / copy_ms,
            goal=f"<= {limit_ms:g} ms",
            met=ours_ms <= limit_ms,
        )


if __name__ == "__main__":
    main()
