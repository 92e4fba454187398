"""What can be set of the KV of prefixes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kakeya.prefix.warm.declared_prompts import DeclaredPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecacheConfig:
    """KV of prefixes that outlives generations: how much memory and disk it may take, 0 = none.

    Conversations share `parallel` slots of a model, 0 = as many as its context and the memory
    allow. A short-lived prefix is looked after each `keep_alive_s` at the latest, idle
    conversations each `sweep_s`. Blocks are exchanged with peers if `peers`; where the fleet has a
    common key in `key_file`, calls for them are signed with it, for one `tenant`.
    """

    memory_bytes: int
    disk_bytes: int
    parallel: int
    keep_alive_s: float
    sweep_s: float
    peers: bool = True
    key_file: Path | None = None
    tenant: str = ""
    prompts: tuple[DeclaredPrompt, ...] = ()
