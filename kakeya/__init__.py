"""Kakeya: one node per Mac mini, one place to run language models for agents.

The public names are offered here and loaded on first use, so that importing one of them
does not import the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_ROLES = (
    "ASR", "DRAFTER", "EMBEDDING", "EMOTION", "SPEAKER_ID", "TEXT_TARGET", "TTS", "TURN_DETECTOR",
    "VAD", "VISION", "WAKE_WORD",
)  # fmt: skip
_HOMES = {
    **dict.fromkeys(_ROLES, "kakeya.memory.resident"),
    "Capability": "kakeya.memory.capability",
    "CapabilityRegistry": "kakeya.fleet.registry",
    "Client": "kakeya.runtime.client",
    "DistributedSpeculativeDecoder": "kakeya.decoding.speculative",
    "Handle": "kakeya.memory.handle",
    "Loaded": "kakeya.memory.capability",
    "MemoryArbiter": "kakeya.memory.memory_arbiter",
    "NGramProposer": "kakeya.decoding.ngram",
    "RemoteProposer": "kakeya.decoding.remote",
    "RequestPriority": "kakeya.memory.resident",
    "Role": "kakeya.memory.resident",
    "RolePriority": "kakeya.memory.resident",
    "SpeculativeDecoder": "kakeya.decoding.speculative",
    "Terms": "kakeya.memory.handle",
    "VisionEmbedding": "kakeya.memory.embeddings",
    "Warmth": "kakeya.memory.resident",
    "accept_block": "kakeya.decoding.acceptance",
    "embedding_key": "kakeya.memory.embeddings",
    "exchange_once": "kakeya.fleet.exchange",
    "normalised": "kakeya.memory.embeddings",
    "plan_spec_decode_placement": "kakeya.fleet.placement",
    "probe_ring_environment": "kakeya.fleet.ring",
    "ring_path_available": "kakeya.fleet.ring",
}
_MODULES = {"errors": "kakeya.core.errors", "events": "kakeya.memory.events"}

__all__ = ["__version__", *_HOMES, *_MODULES]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Load a public name from its room on first use."""
    if name in _MODULES:
        return import_module(_MODULES[name])
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kakeya' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
