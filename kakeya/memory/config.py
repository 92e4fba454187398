"""What can be set of memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """How much memory the models may occupy together, and how long one stays unused.

    `budget_bytes` None = what the machine has, less `reserve_bytes` for everything else. Until
    `stay_warm_s` after its last use a model goes only for what is more urgent or waited long;
    after `unload_after_s` it goes though nobody needs the room, None = it stays. Models in `pinned`
    stay whatever comes. `stated_bytes` is what the owner says that models take, by id, where that
    is not to be estimated. `lease_store` is where leases of other processes are kept, "" = the data
    directory.
    """

    budget_bytes: int | None
    reserve_bytes: int
    stay_warm_s: float
    unload_after_s: float | None
    lease_store: str
    pinned: tuple[str, ...] = ()
    stated_bytes: tuple[tuple[str, int], ...] = ()
