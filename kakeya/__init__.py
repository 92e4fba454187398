"""Kakeya: one node per Mac mini, one place to run language models for agents.

The public names are offered here and loaded on first use, so that importing one of them
does not import the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_ROLES = (
    "ASR", "DIFFUSION", "DRAFTER", "EMBEDDING", "EMOTION", "SPEAKER_ID", "TEXT_TARGET", "TTS",
    "TURN_DETECTOR", "VAD", "VISION", "WAKE_WORD",
)  # fmt: skip
_HOMES = {
    **dict.fromkeys(_ROLES, "kakeya.memory.arbiter.resident"),
    "Capability": "kakeya.memory.arbiter.capability",
    "CapabilityRegistry": "kakeya.fleet.view.registry",
    "Client": "kakeya.sessions.client",
    "DistributedSpeculativeDecoder": "kakeya.decoding.library.speculative",
    "FleetChange": "kakeya.fleet.gossip.watching",
    "Handle": "kakeya.memory.arbiter.handle",
    "Loaded": "kakeya.memory.arbiter.capability",
    "MemoryArbiter": "kakeya.memory.api",
    "NGramProposer": "kakeya.decoding.ngram.ngram",
    "Offer": "kakeya.fleet.cards.cards",
    "ProposerService": "kakeya.decoding.serve.service",
    "RemoteProposer": "kakeya.decoding.remote.remote",
    "RemoteProposerError": "kakeya.decoding.remote.remote",
    "RequestPriority": "kakeya.memory.arbiter.resident",
    "Role": "kakeya.memory.arbiter.resident",
    "RolePriority": "kakeya.memory.arbiter.resident",
    "SpeculativeDecoder": "kakeya.decoding.library.speculative",
    "SyncClient": "kakeya.sessions.sync_client",
    "Terms": "kakeya.memory.arbiter.handle",
    "VisionEmbedding": "kakeya.memory.embeddings",
    "VocabularyMismatch": "kakeya.decoding.remote.vocabulary",
    "Warmth": "kakeya.memory.arbiter.resident",
    "accept_block": "kakeya.decoding.draft.acceptance",
    "embedding_key": "kakeya.memory.embeddings",
    "exchange_once": "kakeya.fleet.gossip.round",
    "mlx_pair": "kakeya.mlx.library",
    "mlx_verifier": "kakeya.mlx.library",
    "normalised": "kakeya.memory.embeddings",
    "plan_spec_decode_placement": "kakeya.fleet.placement.placement",
    "probe_ring_environment": "kakeya.fleet.placement.ring",
    "report_progress": "kakeya.memory.arbiter.capability",
    "ring_path_available": "kakeya.fleet.placement.ring",
}
_MODULES = {"errors": "kakeya.core.errors", "events": "kakeya.memory.arbiter.events"}

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
