"""Read the config classes of all parts from a command line, the environment and one TOML file.

A value comes from a flag, else from a variable, else from the file, else it is the default. A flag
or a key that no class has is an error with the nearest name.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from kakeya.core.errors import ConfigError
from kakeya.core.settings import METADATA, Illegal, Setting, nearest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Part = TypeVar("Part", bound="DataclassInstance")
CONFIG_FLAG, CONFIG_VARIABLE = "--config", "KAKEYA_CONFIG"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Values as each origin holds them; keys are flags, variables and file keys.

    `usual` are defaults that depend on the machine, by file key.
    """

    flags: Mapping[str, object]
    environ: Mapping[str, str]
    file: Mapping[str, object]
    file_name: str = ""
    usual: Mapping[str, object]

    def value(self, setting: Setting[object]) -> object:
        """Return the value of the strongest origin. Raises ConfigError."""
        for origin, raw in self._found(setting):
            try:
                return setting.parse(raw)
            except Illegal as problem:
                raise ConfigError(f"{origin}: {problem}") from problem
        return self.usual.get(setting.key, setting.default)

    def _found(self, setting: Setting[object]) -> Iterator[tuple[str, object]]:
        if setting.flag in self.flags:
            yield setting.flag, self.flags[setting.flag]
        for variable in (setting.variable, *setting.earlier):
            if text := self.environ.get(variable, ""):
                parts = [part.strip() for part in text.split(",") if part.strip()]
                yield variable, parts if setting.repeats else text
        if setting.key in self.file:
            yield f"{self.file_name}: {setting.key}", self.file[setting.key]


def settings_of(part: type[DataclassInstance], section: str) -> Iterator[Setting[object]]:
    """List the settings of a config class and of the classes in its fields, with all names."""
    for name, member in _members(part, section):
        if isinstance(member, Setting):
            yield member
        else:
            yield from settings_of(member, name)


def read_part(part: type[Part], section: str, sources: Sources) -> Part:
    """Make a config class of the values in the sources. Raises ConfigError."""
    make: Callable[..., Part] = part
    values = {
        name: sources.value(member)
        if isinstance(member, Setting)
        else read_part(member, name, sources)
        for name, member in _members(part, section)
    }
    return make(**values)


def parse_flags(settings: Iterable[Setting[object]], argv: Sequence[str]) -> dict[str, object]:
    """Return only the flags that were given, by flag name. Raises ConfigError."""
    flagged = [setting for setting in settings if setting.flag]
    parser = _Parser(
        prog="kakeya-node",
        description="One node of a Kakeya fleet; without flags: the embedded model on loopback.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for one in flagged:
        action = "append" if one.repeats else "store" if one.argument else "store_true"
        flag = parser.add_argument(one.flag, dest=one.flag, help=one.meaning, action=action)
        flag.metavar = one.argument or None
    parser.add_argument(
        CONFIG_FLAG, dest=CONFIG_FLAG, metavar="FILE.toml", help="read settings from a file"
    )
    given, unknown = parser.parse_known_args(list(argv))
    if unknown:
        known = [one.flag for one in flagged] + [CONFIG_FLAG]
        word = unknown[0].partition("=")[0]
        raise ConfigError(f"unknown argument {unknown[0]}{nearest(word, known)}")
    return dict(vars(given))


def read_tables(part: type[Part], section: str, sources: Sources) -> dict[str, Part]:
    """Make a config class of each table [section.NAME] of the file, by name. Raises ConfigError."""
    content, found = sources.file.get(section, {}), {}
    if not isinstance(content, dict):
        raise ConfigError(f"{sources.file_name}: {section} is no table; write [{section}.NAME]")
    for name, table in content.items():
        where = f"{section}.{name}"
        if not isinstance(table, dict):
            raise ConfigError(f"{sources.file_name}: unknown key {where}; write [{section}.NAME]")
        file = {f"{where}.{key}": value for key, value in table.items()}
        _check_keys(file, [one.key for one in settings_of(part, where)], sources.file_name)
        found[name] = read_part(part, where, replace(sources, flags={}, environ={}, file=file))
    return found


def read_file(
    settings: Iterable[Setting[object]], path: Path, tables: Collection[str] = ()
) -> dict[str, object]:
    """Read a TOML file into `section.key` -> value; tables within sections of `tables` stay whole,
    under the section's name, for `read_tables`. Raises ConfigError."""
    try:
        tree = tomllib.loads(path.read_text("utf-8"))
    except OSError as problem:
        reason = problem.strerror or problem
        raise ConfigError(f"{path}: the configuration cannot be read: {reason}") from problem
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{path}: not a TOML file: {problem}") from problem
    known = [setting.key for setting in settings]
    flat: dict[str, object] = {}
    whole: dict[str, object] = {}
    for section in tables:
        content = tree.get(section)
        if not any(key.startswith(f"{section}.") for key in known):  # it has tables alone
            whole |= {section: tree.pop(section)} if section in tree else {}
        elif isinstance(content, dict):
            names = [
                name
                for name, one in content.items()
                if isinstance(one, dict) and f"{section}.{name}" not in known
            ]
            whole[section] = {name: content.pop(name) for name in names}
    for section, content in tree.items():
        if not isinstance(content, dict):
            others = {*known, *tables} - {section}
            raise ConfigError(f"{path}: unknown key {section}{nearest(section, others)}")
        flat |= {f"{section}.{key}": value for key, value in content.items()}
    _check_keys(flat, [*known, *tables], str(path))
    return flat | whole


def _check_keys(keys: Iterable[str], known: Collection[str], file_name: str) -> None:
    for key in keys:
        if key not in known:
            raise ConfigError(f"{file_name}: unknown key {key}{nearest(key, known)}")


def _members(
    part: type[DataclassInstance], section: str
) -> Iterator[tuple[str, Setting[object] | type[DataclassInstance]]]:
    for one in fields(part):
        if METADATA in one.metadata:
            yield one.name, one.metadata[METADATA].named(section, one.name)
        elif is_dataclass(one.default_factory):
            yield one.name, one.default_factory


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)
