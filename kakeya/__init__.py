"""Kakeya: one node per Mac mini, one place to run language models for agents.

The public names are offered here and loaded on first use, so that importing one of them
does not import the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "CapabilityRegistry": "kakeya.fleet.registry",
    "Client": "kakeya.runtime.client",
    "DistributedSpeculativeDecoder": "kakeya.decoding.speculative",
    "MemoryArbiter": "kakeya.memory.memory_arbiter",
    "NGramProposer": "kakeya.decoding.ngram",
    "RemoteProposer": "kakeya.decoding.remote",
    "SpeculativeDecoder": "kakeya.decoding.speculative",
    "accept_block": "kakeya.decoding.acceptance",
    "exchange_once": "kakeya.fleet.exchange",
    "plan_spec_decode_placement": "kakeya.fleet.placement",
    "probe_ring_environment": "kakeya.fleet.ring",
    "ring_path_available": "kakeya.fleet.ring",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Load a public name from its room on first use."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kakeya' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
