"""The kinds of content in pages, their pins, and the order of eviction by worth.

    keep = 0.6 * 1 / (1 + age)  +  0.2 * pages / all pages  +  0.2 * rank of the content

The worth is in 0..1; the lowest is evicted first. The age is in seconds since the block was last in
use, and the rank is spread evenly over 0..1, so that no content outweighs recency: a buffer that
was just used stays while a prefix that idles for an hour goes. Three types of urgency exist in this
program; `ContentPriority` is the one of pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from kakeya.core.errors import ConfigError
from kakeya.core.units import KIB, MIB, format_bytes

PAGE_SIZES = (512 * KIB, 1 * MIB, 2 * MIB, 4 * MIB)


class ContentType(StrEnum):
    """The kinds of content of a block."""

    KV_CACHE = "kv_cache"
    LORA_WEIGHT = "lora_weight"
    TEMP_BUFFER = "temp_buffer"
    ACTIVATION = "activation"
    GRADIENT = "gradient"


class ContentPriority(IntEnum):
    """The rank of a content: the lowest is evicted first."""

    TEMP_BUFFER = 1
    ACTIVATION = 2
    GRADIENT = 3
    LORA_COLD = 4
    LORA_WARM = 5
    LORA_HOT = 6
    KV_CACHE = 7


_RANKS = len(ContentPriority) - 1


class Unpinning(StrEnum):
    """The way in which pins end."""

    SCOPED = "scoped"  # leaving the `with` block
    MANUAL = "manual"  # the owner, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class PinRule:
    """The lifetime of pins on one content, and its priority where the tenant gives none."""

    lifetime: str
    unpinning: Unpinning
    priority: ContentPriority


PIN_RULES: Mapping[ContentType, PinRule] = {
    ContentType.KV_CACHE: PinRule(
        lifetime="request", unpinning=Unpinning.SCOPED, priority=ContentPriority.KV_CACHE
    ),
    ContentType.LORA_WEIGHT: PinRule(
        lifetime="active batch", unpinning=Unpinning.MANUAL, priority=ContentPriority.LORA_WARM
    ),
    ContentType.TEMP_BUFFER: PinRule(
        lifetime="kernel", unpinning=Unpinning.SCOPED, priority=ContentPriority.TEMP_BUFFER
    ),
    ContentType.ACTIVATION: PinRule(
        lifetime="forward and backward pass",
        unpinning=Unpinning.SCOPED,
        priority=ContentPriority.ACTIVATION,
    ),
    ContentType.GRADIENT: PinRule(
        lifetime="backward pass", unpinning=Unpinning.SCOPED, priority=ContentPriority.GRADIENT
    ),
}


class Fit(StrEnum):
    """The choice among free ranges for an allocation."""

    BEST = "best_fit"  # the smallest that suffices: least fragmentation
    FIRST = "first_fit"  # the lowest address that suffices


HEADROOM = 0.1
"""The share of an allocation that is evicted beyond it."""
HIGH_WATERMARK, LOW_WATERMARK = 0.90, 0.80
"""Of the pages, in use: where eviction ahead of need starts, and where it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageConfig:
    """The shape and the thresholds of an arena. Raises ConfigError."""

    page_bytes: int = 2 * MIB  # large pages of the hardware have it, and ranks 8-64 fill it
    slab_pages: int = 128  # growth, shrinking and the largest range: 256 MiB of default pages
    total_pages: int = 4096  # the most that the arena grows to
    fit: Fit = Fit.BEST
    ready_blocks: int = 16  # freed single pages kept at hand before ranges are merged
    headroom: float = HEADROOM  # evict this share more than was asked, so the next one need not
    high_watermark: float = HIGH_WATERMARK  # pages in use: eviction ahead of need starts here
    low_watermark: float = LOW_WATERMARK  # and ends here
    wait_limit_s: float = 0.1  # how long a caller waits in line for pages
    pin_limit_s: float = 30.0  # an ownerless pin ends, any other is reported, after so long

    def __post_init__(self) -> None:
        if self.page_bytes not in PAGE_SIZES:
            allowed = ", ".join(format_bytes(size) for size in PAGE_SIZES)
            raise ConfigError(f"page_bytes is {self.page_bytes}; it must be one of {allowed}")
        if not 1 <= self.slab_pages <= self.total_pages:
            raise ConfigError(
                f"slab_pages is {self.slab_pages}; it must be 1..total_pages ({self.total_pages})"
            )
        if self.ready_blocks < 1:
            raise ConfigError(f"ready_blocks is {self.ready_blocks}; it must be 1 or more")
        if not 0.0 <= self.headroom <= 1.0:
            raise ConfigError(f"headroom is {self.headroom}; it must be 0..1")
        if not 0.0 < self.low_watermark < self.high_watermark <= 1.0:
            raise ConfigError(
                f"the watermarks are {self.low_watermark} and {self.high_watermark}; "
                "they must be 0 < low < high <= 1"
            )
        if not self.wait_limit_s >= 0.0:
            raise ConfigError(f"wait_limit_s is {self.wait_limit_s}; it must be 0 or more")
        if not self.pin_limit_s > 0.0:
            raise ConfigError(f"pin_limit_s is {self.pin_limit_s}; it must be above 0")


def keep_score(*, age_s: float, pages: int, total_pages: int, priority: ContentPriority) -> float:
    """The worth of a block, in 0..1; the lowest is evicted first."""
    recency = 1.0 / (1.0 + age_s) if age_s > 0.0 else 1.0
    return 0.6 * recency + 0.2 * pages / total_pages + 0.2 * (priority - 1) / _RANKS
