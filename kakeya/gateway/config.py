"""Settings of the HTTP gateway; where it listens is `wire/server/config`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kakeya.core.settings import one_of, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """How requests are read."""

    unknown: Literal["refuse", "warn"] = setting(
        "a parameter that no node knows: refused, or left out and named in x-kakeya-ignored",
        one_of("refuse", "warn"),
        "refuse",
    )
    plain_tools: Literal["write", "refuse"] = setting(
        "tools for a model whose chat template shows none: written as plain text, or refused",
        one_of("write", "refuse"),
        "write",
    )
