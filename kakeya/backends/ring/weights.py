"""What a node has of a model that a ring group shares: its folder, and what all ranks must have in
common. Blocks: files are read."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kakeya.adapters.files.base import base_fingerprint
from kakeya.backends.ring.spec import RingSpec
from kakeya.backends.sizes import FIRST_KV_TOKENS, LeaseSize
from kakeya.core.errors import ConfigError, InvalidArgument
from kakeya.generation.spec import is_gguf, resolve, where_pulled
from kakeya.memory.estimate.estimate import Estimate, cached_snapshot, estimate_source
from kakeya.memory.estimate.size_file import hub_folder

_PACKAGES = ("kakeya", "mlx", "mlx-lm")
_UNEVEN = 1.1
"""Shares are of whole heads and layers, and a pipeline's ranks all have the embedding."""


class OwnWeights:
    """The weights on this node: of models in its configuration (`sources`), pulled ones in the
    folder `pulled`, or others by folder or name. `label` is the node's name for people."""

    def __init__(self, label: Callable[[], str], sources: Mapping[str, str], pulled: Path) -> None:
        self.label = label
        """The name of this node for people."""
        self._sources = sources
        self._pulled = pulled

    def folder(self, spec: RingSpec) -> Path:
        """The folder of a group's model. Blocks. Raises ConfigError."""
        found = self._sources.get(spec.source, "")
        try:
            found = found or resolve(where_pulled(spec.model(), self._pulled))
        except ConfigError as problem:
            raise self._missing(spec, problem.message) from problem
        if is_gguf(found):
            raise ConfigError(
                f"{found} is a model for llama-server; a ring group shares safetensors"
            )
        if Path(found).is_dir():
            return Path(found)
        cached = cached_snapshot(found, hub_folder(os.environ, Path.home()))
        if cached is None:
            raise self._missing(spec, f"{found} is not in the cache of Hugging Face")
        return cached

    def _missing(self, spec: RingSpec, why: str) -> ConfigError:
        return ConfigError(
            f"{self.label()} has no weights of {spec.source} ({why}); bring them there with "
            f"`kakeya models pull {spec.source}`"
        )


def facts_of(folder: Path) -> Mapping[str, str]:
    """What must be equal at all ranks, by name. Raises ConfigError."""
    facts = {name: _version(name) for name in _PACKAGES}
    try:
        return facts | {"weights": base_fingerprint(folder)}
    except (InvalidArgument, OSError) as problem:
        raise ConfigError(f"the weights in {folder} cannot be read: {problem}") from problem


def compare(rank: int, label: str, theirs: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Raise ConfigError for a rank that would compute something else than rank 0."""
    for name, value in own.items():
        if theirs.get(name) != value:
            raise ConfigError(
                f"rank {rank} on {label} has {name} {theirs.get(name, 'unknown')[:12]}, and rank 0 "
                f"{value[:12]}: all ranks of a group need the same"
                + ("; `kakeya models pull` brings the weights" if name == "weights" else "")
            )


def estimate_of(folder: Path) -> Estimate:
    """The size of the whole model."""
    return estimate_source(
        str(folder), hub=None, kv_tokens=FIRST_KV_TOKENS, widens=sys.platform != "darwin"
    )


def rank_size(spec: RingSpec, rank: int, whole: Estimate) -> LeaseSize:
    """The lease of a rank: as its seat says, or its share of the whole."""
    share = spec.shares()[rank]
    kv_bytes = int(whole.kv_bytes * share)
    fixed_bytes = whole.base_bytes - whole.weights_bytes
    base_bytes = fixed_bytes + int(whole.weights_bytes * min(1.0, share * _UNEVEN))
    if said := spec.seats[rank].lend_bytes:
        base_bytes = max(fixed_bytes, said - kv_bytes)
    estimate = Estimate(
        base_bytes=base_bytes,
        weights_bytes=int(whole.weights_bytes * share),
        kv_bytes=kv_bytes,
        kv_bytes_per_token=int(whole.kv_bytes_per_token * share),
        source="stated" if said else whole.source,
        # No digest: the history knows whole models.
        work_bytes=whole.work_bytes,
    )
    return LeaseSize(estimate, kv_bytes)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
