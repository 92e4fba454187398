"""The part of `table` about what lies in pages: adapters, pages themselves, prefixes."""

from __future__ import annotations

from pathlib import Path

from kakeya.adapters.tiers import TierRules
from kakeya.core import settings as s
from kakeya.core.settings import Setting
from kakeya.core.units import KIB
from kakeya.memory.pages.content import HEADROOM, PAGE_SIZES, Fit
from kakeya.prefix.warm.declared_prompts import DeclaredPrompt, parse_prompts

_NO_PROMPTS: tuple[DeclaredPrompt, ...] = ()
_TIERS = TierRules()
ADAPTER_SLOTS = Setting(
    key="adapters.slots",
    variable="KAKEYA_ADAPTERS_SLOTS",
    parse=s.whole(0, 256, "slots"),
    default=8,
)
ADAPTER_RANK = Setting(
    key="adapters.rank",
    variable="KAKEYA_ADAPTERS_RANK",
    parse=s.whole(1, 1024, "ranks"),
    default=16,
)
ADAPTER_WARM = Setting(
    key="adapters.warm_mb",
    variable="KAKEYA_ADAPTERS_WARM_MB",
    parse=s.whole(1, 1024 * 1024, "MB"),
    default=256,
)
ADAPTER_SLAB = Setting(
    key="adapters.slab_mb",
    variable="KAKEYA_ADAPTERS_SLAB_MB",
    parse=s.whole(1, 4096, "MB"),
    default=16,
)
ADAPTER_WINDOW = Setting(
    key="adapters.window_s",
    variable="KAKEYA_ADAPTERS_WINDOW_S",
    parse=s.number(1, 86400, "seconds"),
    default=_TIERS.window_s,
)
ADAPTER_HOT_USES = Setting(
    key="adapters.hot_uses",
    variable="KAKEYA_ADAPTERS_HOT_USES",
    parse=s.whole(1, 100_000, "uses"),
    default=_TIERS.hot_uses,
)
ADAPTER_WARM_PLACES = Setting(
    key="adapters.warm_places",
    variable="KAKEYA_ADAPTERS_WARM_PLACES",
    parse=s.whole(0, 100_000, "adapters"),
    default=_TIERS.warm_places,
)
PAGE_SIZE = Setting(
    key="pages.page_kb",
    variable="KAKEYA_PAGES_PAGE_KB",
    parse=s.one_number_of([size // KIB for size in PAGE_SIZES], "KB"),
    default=min(PAGE_SIZES) // KIB,  # an adapter of a small model fills a part of one
)
PAGE_FIT = Setting(
    key="pages.fit",
    variable="KAKEYA_PAGES_FIT",
    parse=s.one_of(*(fit.value for fit in Fit)),
    default=Fit.BEST.value,
)
PAGE_HEADROOM = Setting(
    key="pages.headroom",
    variable="KAKEYA_PAGES_HEADROOM",
    parse=s.number(0, 1, "of what is asked for"),
    default=HEADROOM,
)
PRECACHE_MEMORY = Setting(
    key="precache.memory_mb",
    variable="KAKEYA_PRECACHE_MEMORY_MB",
    parse=s.whole(0, 1024 * 1024, "MB"),
    default=1024,
)
PRECACHE_DISK = Setting(
    key="precache.disk_mb",
    variable="KAKEYA_PRECACHE_DISK_MB",
    parse=s.whole(0, 64 * 1024 * 1024, "MB"),
    default=4096,
)
PRECACHE_PARALLEL = Setting(
    key="precache.parallel",
    variable="KAKEYA_PRECACHE_PARALLEL",
    parse=s.whole(0, 1024, "slots"),
    default=0,
)
PRECACHE_KEEP_ALIVE = Setting(
    key="precache.keep_alive_s",
    variable="KAKEYA_PRECACHE_KEEP_ALIVE_S",
    parse=s.number(0, 86400, "seconds"),
    default=240.0,
)
PRECACHE_SWEEP = Setting(
    key="precache.sweep_s",
    variable="KAKEYA_PRECACHE_SWEEP_S",
    parse=s.number(0, 86400, "seconds"),
    default=300.0,
)
PRECACHE_PEERS = Setting(
    key="precache.peers",
    variable="KAKEYA_PRECACHE_PEERS",
    parse=s.switch,
    default=True,
)
PRECACHE_KEY_FILE: Setting[Path | None] = Setting(
    key="precache.key_file",
    variable="KAKEYA_PRECACHE_KEY_FILE",
    parse=s.folder,
    default=None,
)
PRECACHE_TENANT = Setting(
    key="precache.tenant",
    variable="KAKEYA_PRECACHE_TENANT",
    parse=s.text,
    default="fleet",
)
PRECACHE_PROMPTS = Setting(
    key="precache.prompts",
    variable="KAKEYA_PRECACHE_PROMPTS",
    parse=parse_prompts,
    default=_NO_PROMPTS,
)
PAGE_SETTINGS: tuple[Setting[object], ...] = (
    ADAPTER_SLOTS,
    ADAPTER_RANK,
    ADAPTER_WARM,
    ADAPTER_SLAB,
    ADAPTER_WINDOW,
    ADAPTER_HOT_USES,
    ADAPTER_WARM_PLACES,
    PAGE_SIZE,
    PAGE_FIT,
    PAGE_HEADROOM,
    PRECACHE_MEMORY,
    PRECACHE_DISK,
    PRECACHE_PARALLEL,
    PRECACHE_KEEP_ALIVE,
    PRECACHE_SWEEP,
    PRECACHE_PEERS,
    PRECACHE_KEY_FILE,
    PRECACHE_TENANT,
    PRECACHE_PROMPTS,
)
