"""The names of all settings: key -> variable, flag, metavar, help, repeatable, switch."""

from __future__ import annotations

from kakeya.config.table import SETTINGS


def named() -> dict[str, list[object]]:
    return {
        one.key: [one.variable, one.flag, one.metavar, one.help, one.repeatable, one.switch]
        for one in SETTINGS
    }
