"""Where settings are given: flags, and one TOML file; by name, and not looked at yet.

A flag or a key that `table` does not have is an error that names the nearest known one.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from kakeya.config.table import SETTINGS
from kakeya.core.errors import ConfigError
from kakeya.core.settings import nearest

CONFIG_FLAG, CONFIG_VARIABLE = "--config", "KAKEYA_CONFIG"
_FLAGGED = tuple(setting for setting in SETTINGS if setting.flag)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse_flags(argv: Sequence[str]) -> dict[str, object]:
    """Return only the flags that were given, by flag name. Raises ConfigError."""
    parser = _Parser(
        prog="kakeya-node",
        description="One node of a Kakeya fleet; without flags: the embedded model on loopback.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for setting in _FLAGGED:
        if setting.switch:
            parser.add_argument(
                setting.flag, dest=setting.flag, action="store_true", help=setting.help
            )
        else:
            parser.add_argument(
                setting.flag,
                dest=setting.flag,
                metavar=setting.metavar,
                help=setting.help,
                action="append" if setting.repeatable else "store",
            )
    parser.add_argument(
        CONFIG_FLAG, dest=CONFIG_FLAG, metavar="FILE.toml", help="read settings from a file"
    )
    given, unknown = parser.parse_known_args(list(argv))
    if unknown:
        known = [setting.flag for setting in _FLAGGED] + [CONFIG_FLAG]
        flag = unknown[0].partition("=")[0]
        raise ConfigError(f"unknown argument {unknown[0]}{nearest(flag, known)}")
    return dict(vars(given))


def read_file(path: Path) -> dict[str, object]:
    """Read a TOML file into `section.key` -> value. Raises ConfigError."""
    try:
        tree = tomllib.loads(path.read_text("utf-8"))
    except OSError as problem:
        reason = problem.strerror or problem
        raise ConfigError(f"{path}: the configuration cannot be read: {reason}") from problem
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{path}: not a TOML file: {problem}") from problem
    known = [setting.key for setting in SETTINGS]
    flat: dict[str, object] = {}
    for section, content in tree.items():
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: unknown key {section}{nearest(section, known)}")
        flat |= {f"{section}.{key}": value for key, value in content.items()}
    for key in flat:
        if key not in known:
            raise ConfigError(f"{path}: unknown key {key}{nearest(key, known)}")
    return flat
