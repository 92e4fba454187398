"""Settings of LoRA adapters, and of the pages that adapters and prefixes share."""

from __future__ import annotations

from dataclasses import dataclass, field

from kakeya.adapters.tiers import TierRules
from kakeya.core.settings import megabytes, number, one_number_of, one_of, setting, whole
from kakeya.core.units import KIB, MIB
from kakeya.memory.pages.content import HEADROOM, HIGH_WATERMARK, LOW_WATERMARK, PAGE_SIZES, Fit

_page_kb = one_number_of([size // KIB for size in PAGE_SIZES], "KB")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """How many adapters an engine holds, how large they are, and how pages are shared out."""

    slots: int = setting(
        "the most adapters that an engine holds at the same time, as far as there is memory; "
        "0: no adapter is served",
        whole(0, 256, "slots"),
        8,
    )
    rank: int = setting("the largest rank of an adapter", whole(1, 1024, "ranks"), 16)
    warm_bytes: int = setting(
        "the most memory for adapters outside the engines", megabytes(1, 1024 * 1024), 256 * MIB
    )
    slab_bytes: int = setting(
        "memory that is taken at once, and the largest size of one adapter",
        megabytes(1, 4096),
        16 * MIB,
    )
    rules: TierRules = field(default_factory=TierRules)
    page_bytes: int = setting(
        "the size of a page",
        lambda raw: _page_kb(raw) * KIB,
        min(PAGE_SIZES),  # an adapter of a small model fills a part of one
        key="pages.page_kb",
    )
    fit: Fit = setting(
        "which free range an allocation gets", one_of(*Fit), Fit.BEST, key="pages.fit"
    )
    headroom: float = setting(
        "an eviction frees this share more than is asked for",
        number(0, 1, "of what is asked for"),
        HEADROOM,
        key="pages.headroom",
    )
    high_watermark: float = setting(
        "pages are evicted ahead of need once this share of them is in use",
        number(0, 1, "of the pages"),
        HIGH_WATERMARK,
        key="pages.high_watermark",
    )
    low_watermark: float = setting(
        "and until no more than this share is in use",
        number(0, 1, "of the pages"),
        LOW_WATERMARK,
        key="pages.low_watermark",
    )
