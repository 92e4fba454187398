"""The leases of a node's models.

    lease    the memory of the engine right after its load (estimated, later measured), and room for
             keys and values

llama-server, which runs GGUF files, takes the memory of all its keys and values at the start.
The room of other engines holds `FIRST_KV_TOKENS` tokens at first; the engine asks for more when
sequences need it (`engine/kv_lender`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from kakeya.backends.images.model import IMAGE
from kakeya.backends.model_life import EMBED
from kakeya.core import darwin
from kakeya.core.errors import ConfigError
from kakeya.core.host import unified_memory_bytes
from kakeya.core.log import event
from kakeya.core.units import GIB, MIB, format_bytes
from kakeya.memory.arbiter.policy import budget_bytes, check_fixed
from kakeya.memory.config import MemoryConfig
from kakeya.memory.estimate.estimate import Estimate, estimate_source, stated
from kakeya.memory.estimate.history import SizeHistory
from kakeya.memory.estimate.pipeline import estimate_pipeline
from kakeya.memory.machine.machine import LinuxMachine
from kakeya.memory.machine.panics import Profile

_log = logging.getLogger(__name__)
FIRST_KV_TOKENS = 2_048
"""The fewest tokens of KV with which a model is of use: each load has room for them."""
UNKNOWN_KV_BYTES = 256 * MIB
"""The assumed size of a model of which only the name is known."""


class Lent(NamedTuple):
    """The lease of an engine in bytes: `kv_bytes` are for keys and values, `unfilled_bytes` are not
    used yet."""

    bytes: int
    kv_bytes: int
    unfilled_bytes: int


@dataclass(frozen=True, slots=True)
class LeaseSize:
    """The size of a model's lease in bytes. The estimate is for one sequence of FIRST_KV_TOKENS."""

    estimate: Estimate
    kv_bytes: int
    """Room for keys and values: a firm bound, which the engine enforces."""

    @property
    def bytes(self) -> int:
        """The lease before the first measurement."""
        return self.estimate.base_bytes + self.kv_bytes

    @property
    def least_kv_bytes(self) -> int:
        """The least room for keys and values with which the model is of use."""
        return min(self.kv_bytes, self.estimate.kv_bytes)

    def lent(self, footprint_bytes: int | None, free_bytes: int) -> Lent:
        """Return the lease of an engine by its footprint before the first request.

        If it is larger than estimated, and than the free memory, sessions get less room.
        """
        base = max(self.estimate.base_bytes, (footprint_bytes or 0) + self.estimate.work_bytes)
        over = max(0, base - self.estimate.base_bytes - max(0, free_bytes))
        kv_bytes = max(self.least_kv_bytes, self.kv_bytes - over)
        lent = base + kv_bytes
        return Lent(lent, kv_bytes, max(0, lent - (footprint_bytes or base)))


def _owners_limit_mb() -> int:
    """The limit of Metal that the owner of this Mac set, in MB; 0 = none."""
    try:
        return max(0, darwin.sysctl_number("iogpu.wired_limit_mb"))
    except OSError:
        return 0


def node_budget(
    config: MemoryConfig,
    profile: Profile,
    *,
    working_set_bytes: int | None = None,
    platform: str = sys.platform,
    owners_limit_mb: Callable[[], int] = _owners_limit_mb,
) -> int:
    """Return the most bytes that all models of a node may occupy together.

    `working_set_bytes` is the limit that Metal told an engine, None = no engine ran on it yet.
    Blocks. Raises ConfigError if that is 0.
    """
    total = unified_memory_bytes()
    limited = LinuxMachine().limited() if platform == "linux" else None
    if limited is not None:
        total = min(total, limited.total_bytes)
    reserve = int(config.reserve_bytes * profile.reserve_factor)
    metal = None
    if platform == "darwin":
        metal = owners_limit_mb() * MIB or working_set_bytes or _usual_limit(total)
        # Below the limit of Metal a larger reserve alone would change nothing.
        metal -= reserve - config.reserve_bytes
    return budget_bytes(
        total_bytes=total,
        configured_bytes=config.budget_bytes,
        metal_limit_bytes=metal,
        reserve_bytes=reserve,
    )


def _usual_limit(total_bytes: int) -> int:
    """Guess the bytes that Metal lets one process keep wired: the share of older systems, which
    later ones exceed on large machines."""
    return total_bytes * 3 // 4 if total_bytes > 36 * GIB else total_bytes * 2 // 3


def lease_size(estimate: Estimate, budget: int) -> LeaseSize:
    """Size the lease of a model within a budget.

    The estimate is for one sequence of FIRST_KV_TOKENS.
    """
    least = estimate.kv_bytes
    wanted = least if estimate.kv_bytes_per_token else UNKNOWN_KV_BYTES
    return LeaseSize(estimate, min(wanted, max(least, budget - estimate.base_bytes)))


def check_named(setting: str, named: Iterable[str], models: Collection[str]) -> None:
    """Raise ConfigError if a setting names a model that this node does not have."""
    unknown = [model_id for model_id in named if model_id not in models]
    if unknown:
        raise ConfigError(
            f"{setting} names {unknown[0]!r}; the models of this node are {', '.join(models)}"
        )


def check_pinned(
    pinned: Collection[str], sizes: Mapping[str, LeaseSize], others: Iterable[str], budget: int
) -> None:
    """Check the pinned models of a node.

    Raises ConfigError for an unknown one, and if beside the pinned ones one of `others`, which take
    turns, could never be loaded.
    """
    check_named("memory.pinned", pinned, sizes)
    if pinned:
        fixed = {model_id: sizes[model_id].bytes for model_id in pinned}
        turns = {one: sizes[one].bytes for one in others if one not in fixed}
        largest = max(turns, key=turns.__getitem__, default="")
        check_fixed(fixed | ({largest: turns[largest]} if largest else {}), budget)


def lease_sizes(
    sources: Mapping[str, tuple[str, str]],
    budget: int,
    *,
    history: SizeHistory,
    hub: Path | None,
    stated_bytes: Mapping[str, int] = MappingProxyType({}),
    fixed_kv_bytes: Mapping[str, int] = MappingProxyType({}),
    platform: str = sys.platform,
) -> dict[str, LeaseSize]:
    """Size the lease of each model; `sources` maps an id to the resolved source and the capability,
    `fixed_kv_bytes` one of those that take the memory of all keys and values at the start to that.

    Blocks. Raises ConfigError for a model that alone exceeds the budget, and for the stated size of
    an unknown model. A model of which only the name is known is not checked.
    """
    check_named("memory.sizes_mb", stated_bytes, sources)
    sizes = {}
    for model_id, (source, kind) in sources.items():
        widens = platform != "darwin"
        if kind == IMAGE:
            estimate = estimate_pipeline(Path(source), widens=widens, history=history, kind=kind)
        else:
            estimate = estimate_source(
                source,
                hub=hub,
                kv_tokens=FIRST_KV_TOKENS,
                widens=widens,
                history=history,
                kind=kind,
                encodes=kind == EMBED,
            )
        is_fixed = kind in (EMBED, IMAGE) or model_id in fixed_kv_bytes
        base_bytes = estimate.base_bytes + fixed_kv_bytes.get(model_id, 0)
        estimate = replace(estimate, base_bytes=base_bytes)
        if model_id in stated_bytes:
            estimate = stated(estimate, stated_bytes[model_id])
        elif estimate.problem:
            event(_log, "size is a guess", level=logging.WARNING, problem=estimate.problem)
        size = LeaseSize(estimate, 0) if is_fixed else lease_size(estimate, budget)
        sizes[model_id] = size
        if size.bytes > budget and estimate.source != "name":
            raise ConfigError(
                f"model {model_id} needs {format_bytes(size.bytes)} with little room for sessions "
                f"(weights {format_bytes(estimate.weights_bytes)}), and the memory budget is "
                f"{format_bytes(budget)}; choose a smaller model or a larger --memory-budget"
            )
    return sizes
