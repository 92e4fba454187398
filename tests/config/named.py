"""The names of all settings: key -> variable, flag, metavar, help, repeatable, switch."""

from __future__ import annotations

from kakeya.config.config import SETTINGS


def named() -> dict[str, list[object]]:
    return {
        one.key: [
            *(one.variable, one.flag, one.argument or ""),
            *(one.meaning if one.flag else "", one.repeats, one.argument == ""),
        ]
        for one in SETTINGS.values()
    }
