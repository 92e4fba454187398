"""Settings of KV that outlives a generation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kakeya.core.settings import (
    Several,
    folder,
    megabytes,
    number,
    one_of,
    setting,
    switch,
    text,
    whole,
)
from kakeya.core.units import MIB
from kakeya.prefix.warm.declared_prompts import DeclaredPrompt, parse_prompts
from kakeya.text.changing_lines import ChangingLine

KEEP_ALIVE_LEAST_S, SWEEP_LEAST_S = 30.0, 60.0
"""Shorter periods bring nothing: a smaller value is raised to these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecacheConfig:
    """How much KV of prefixes is kept, computed ahead, and exchanged with peers."""

    memory_bytes: int = setting(
        "the most memory for KV of prefixes; 0: none is kept", megabytes(0, 1024 * 1024), 1024 * MIB
    )
    disk_bytes: int = setting(
        "the most disk for KV of prefixes; 0: none", megabytes(0, 64 * 1024 * 1024), 4096 * MIB
    )
    prompts: tuple[DeclaredPrompt, ...] = setting(
        "prompts whose KV is computed ahead: tables, or JSON in the variable", parse_prompts, ()
    )
    warm_nodes: int = setting(
        "on how many nodes each declared prompt is kept warm, this one included",
        whole(1, 16, "nodes"),
        2,
    )
    parallel: int = setting(
        "slots of a model that conversations share; 0: as many as context and memory allow",
        whole(0, 1024, "slots"),
        0,
    )
    keep_alive_s: float = setting(
        "the longest time between two checks of a short-lived prefix",
        number(0, 86400, "seconds"),
        240.0,
    )
    sweep_s: float = setting(
        "the time between two checks of idle conversations", number(0, 86400, "seconds"), 300.0
    )
    move_lines: tuple[ChangingLine, ...] = setting(
        "the kinds of lines, another with every request, that are moved from the front of a system "
        "text; []: none",
        Several(one_of(*ChangingLine)),
        tuple(ChangingLine),
    )
    peers: bool = setting("exchange blocks of KV with peers", switch, True)
    key_file: Path | None = setting(
        "the fleet's common key, which signs calls for blocks", folder, None
    )
    tenant: str = setting("the tenant for whom calls are signed", text, "fleet")
