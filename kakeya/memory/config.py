"""Settings of the memory of models."""

from __future__ import annotations

from dataclasses import dataclass

from kakeya.core.errors import ConfigError
from kakeya.core.settings import Illegal, Several, megabytes, none_if_zero, number, setting, text
from kakeya.generation.manifest import MOST_MB, MOST_WARM_S, Category, Manifest
from kakeya.memory.arbiter.policy import RESERVE_BYTES
from kakeya.memory.arbiter.resident import DIFFUSION, TEXT_TARGET, VISION, Warmth
from kakeya.memory.leases.place import EARLIER, lease_store_url

_STAY_WARM_S = {Category.VISION: VISION.stay_warm_s, Category.DIFFUSION: DIFFUSION.stay_warm_s}
"""Of categories that do not stay as `stay_warm_s` says."""


def _model_size(raw: object) -> tuple[str, int]:
    model_id, equals, size_mb = text(raw).rpartition("=")
    if not equals or not model_id:
        raise Illegal(f"{raw!r} does not state the size of a model; give MODEL=MB")
    return model_id, megabytes(1, MOST_MB)(size_mb)


def _lease_store(raw: object) -> str:
    try:
        return lease_store_url("" if raw == "" else text(raw))
    except ValueError as problem:
        raise Illegal(str(problem)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """The memory of all models together, and the time that an unused model stays."""

    budget_bytes: int | None = setting(
        "the most memory for all models of this node together (0: the machine's memory less a "
        "reserve)",
        none_if_zero(megabytes(0, MOST_MB)),
        None,
        argument="MB",
        flag="--memory-budget",
        earlier=("KAKEYA_MEMORY_BUDGET_MB",),
    )
    reserve_bytes: int = setting(
        "left to the system and other programs when no budget is given",
        megabytes(0, 1024 * 1024),
        RESERVE_BYTES,
    )
    stay_warm_s: float = setting(
        "for so long after its last use a model goes only for a more urgent or a long wait",
        number(0, MOST_WARM_S, "seconds"),
        TEXT_TARGET.stay_warm_s,
    )
    unload_after_s: float | None = setting(
        "a model unused for so long goes although no other needs the room; 0: it stays",
        none_if_zero(number(0, MOST_WARM_S, "seconds")),
        None,
    )
    pinned: tuple[str, ...] = setting("models that always stay", Several(text), ())
    after_panics: tuple[str, ...] = setting(
        "models that are loaded, with care, however often the machine panicked with them in memory",
        Several(text),
        (),
    )
    stated_bytes: tuple[tuple[str, int], ...] = setting(
        "sizes of models as their owner states them, in place of an estimate: MODEL=MB",
        Several(_model_size),
        (),
        key="memory.sizes_mb",
    )
    lease_store: str = setting(
        "where leases of other processes are kept, as redis://HOST:PORT/DB",
        _lease_store,
        "",  # a file in the data directory
        key="leases.store",
        earlier=(EARLIER,),
    )

    def __post_init__(self) -> None:
        if self.unload_after_s is not None and self.unload_after_s < self.stay_warm_s:
            raise ConfigError(
                f"memory.unload_after_s is {self.unload_after_s:g} s, less than "
                f"memory.stay_warm_s, {self.stay_warm_s:g} s; "
                "a model cannot leave while it is kept warm"
            )

    def warmth(self, manifest: Manifest, category: Category, *, is_pinned: bool) -> Warmth:
        """The warmth of a model: as its manifest says, else that of its category."""
        stay_warm_s = manifest.stay_warm_s
        if stay_warm_s is None:
            stay_warm_s = _STAY_WARM_S.get(category, self.stay_warm_s)
            if self.unload_after_s is not None:
                stay_warm_s = min(stay_warm_s, self.unload_after_s)
        return Warmth(
            stay_warm_s=stay_warm_s,
            unload_after_s=self.unload_after_s,
            is_pinned=is_pinned,
        )
