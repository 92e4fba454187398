"""What this node can give to a ring group: memory, speed, and the facts of weights that it has."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kakeya.backends.resident import ResidentModel
from kakeya.backends.ring.chips import chip_name, chip_speed, has_thunderbolt5
from kakeya.core.errors import ConfigError, InvalidArgument, NotFound
from kakeya.core.settings import Illegal
from kakeya.fleet.placement.ring_models import PIPELINE, TENSOR
from kakeya.fleet.placement.ring_speed import RingWeights
from kakeya.generation.facts import ModelFacts
from kakeya.generation.spec import is_gguf, parse_model, resolve
from kakeya.memory.arbiter.plan import Snapshot
from kakeya.memory.estimate.estimate import cached_snapshot
from kakeya.memory.estimate.layers import ModelParts, read_parts
from kakeya.memory.estimate.size_file import hub_folder

KV_TOKENS = 8192
"""A plan has room for the KV of so many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShare:
    """As in `RingNode`."""

    lend_bytes: int
    weights_per_s: float
    products_per_s: float
    speed_from: str
    has_thunderbolt5: bool


class OwnShare:
    """See the module. `models` are those that write text here; `sources` are folders, or names on
    Hugging Face, by model id."""

    def __init__(
        self,
        ledger: Callable[[], Snapshot],
        models: Callable[[], Sequence[ResidentModel]],
        sources: Mapping[str, str],
    ) -> None:
        self._ledger = ledger
        self._models = models
        self._sources = sources

    async def describe(self) -> NodeShare:
        """Tell what can be lent now, and how fast this machine is."""
        lend_bytes = lendable_bytes(self._ledger())
        measured = [
            facts for model in self._models() if (facts := model.facts) and facts.tokens_per_second
        ]
        chip = await asyncio.to_thread(chip_name)
        by_chip = chip_speed(chip)
        weights_per_s, products_per_s = by_chip.weights_per_s, by_chip.products_per_s
        speed_from = "chip" if by_chip.is_known else "assumed"
        # Of the largest: what does not come from its weights is then the smallest part.
        for facts in sorted(measured, key=lambda one: one.weight_bytes):
            try:
                parts = await asyncio.to_thread(_parts, Path(facts.model_path))
            except InvalidArgument:
                continue
            weights_per_s, products_per_s = _speeds(facts, parts, products_per_s)
            speed_from = "measured"
        return NodeShare(
            lend_bytes=lend_bytes,
            weights_per_s=weights_per_s,
            products_per_s=products_per_s,
            speed_from=speed_from,
            has_thunderbolt5=has_thunderbolt5(chip),
        )

    async def weights(self, model: str, *, takes_paths: bool) -> RingWeights:
        """The facts of a model by its name here or, with `takes_paths`, by its folder or its name
        on Hugging Face. Raises NotFound, InvalidArgument."""
        source = self._sources.get(model)
        if source is None and takes_paths:
            model, source = await asyncio.to_thread(_found, model)
        if source is None:
            raise NotFound(f"no model {model[:80]!r} is configured here")
        return await asyncio.to_thread(_weights, model, source)


def lendable_bytes(ledger: Snapshot) -> int:
    """What models that are not pinned would leave to a group, and what is free."""
    leaving = sum(
        one.bytes
        for one in ledger.residents
        if one.is_open and not (one.warmth.is_pinned or one.role.is_lent)
    )
    return max(0, min(ledger.budget_bytes, ledger.free_bytes + leaving))


def _found(said: str) -> tuple[str, str]:
    """The name and the source of a model that is not configured. Raises NotFound,
    InvalidArgument."""
    try:
        spec = parse_model(said)
        return spec.model_id, resolve(spec)
    except Illegal as wrong:
        raise InvalidArgument(str(wrong), param="model") from wrong
    except ConfigError as unknown:
        raise NotFound(unknown.message) from unknown


def _weights(model: str, source: str) -> RingWeights:
    if is_gguf(source):
        raise InvalidArgument(
            f"{source} is a model for llama-server; a ring group shares safetensors"
        )
    folder = Path(source)
    if not folder.is_dir():
        cached = cached_snapshot(source, hub_folder(os.environ, Path.home()))
        if cached is None:
            raise NotFound(f"the weights of {source} are not on this machine")
        folder = cached
    return weights_in(folder, model)


def weights_in(folder: Path, model_id: str = "") -> RingWeights:
    """The facts of the model in a folder. Blocks. Raises InvalidArgument."""
    parts = _parts(folder)
    return RingWeights(
        model_id=model_id,
        kind=parts.kind,
        layers=parts.layers,
        layer_bytes=parts.layer_bytes + -(-parts.kv_bytes // parts.layers),
        shared_bytes=parts.rest_bytes,
        read_bytes=parts.read_bytes,
        head_bytes=parts.head_bytes,
        products=parts.products,
        heads=parts.heads,
        kv_heads=parts.kv_heads,
        hidden_size=parts.hidden_size,
        value_bytes=parts.number_bytes,
        has_tensor=parts.kind in TENSOR,
        has_pipeline=parts.kind in PIPELINE,
    )


def _parts(folder: Path) -> ModelParts:
    return read_parts(folder, kv_tokens=KV_TOKENS, widens=sys.platform != "darwin")


def _speeds(facts: ModelFacts, parts: ModelParts, products_per_s: float) -> tuple[float, float]:
    reads = facts.tokens_per_second * (parts.read_bytes + parts.head_bytes)
    return reads, facts.prefill_tokens_per_second * parts.products or products_per_s
