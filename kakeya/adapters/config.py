"""What can be set of adapters."""

from __future__ import annotations

from dataclasses import dataclass

from kakeya.adapters.tiers import TierRules
from kakeya.memory.pages.content import Fit


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """LoRA adapters: how many an engine holds at the same time (0 = none are served), their
    largest rank, how much memory those beside the engines may take, how much of it is taken at
    once, which is the largest that one adapter may be, and what brings one nearer to its engine.

    The pages that they lie in, which prefixes share: how large one is, which free range is taken,
    and what share more than is asked for goes where some have to.
    """

    slots: int
    rank: int
    warm_bytes: int
    slab_bytes: int
    page_bytes: int
    fit: Fit
    headroom: float
    rules: TierRules
