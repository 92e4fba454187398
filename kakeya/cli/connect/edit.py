"""Edits of a program's configuration file that keep what else stands in it, and can be undone.

An edit is told by the values that the file shall have. In TOML and YAML they stand in marked
blocks, and lines that they replace become comments, so everything else stays as it was, to the
byte. JSON has no comments: the values are merged, and the file is written with its indentation.

Laws: the edited text says what the old one said, with the values merged into it; `restore` of the
edited text gives back the old one, byte for byte. `apply` checks both and raises Uneditable.
"""

from __future__ import annotations

import json
import re
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

Values = Mapping[str, object]
BEGIN = "# >>> kakeya connect >>>"
END = "# <<< kakeya connect <<<"
OWN = "kakeya"
"""A key that no other program uses."""
KEPT = "# kakeya connect keeps: "
_BLOCK = re.compile(rf"^{BEGIN}\r?\n(?:.*\n)*?{END}(?:\r?\n|\Z)", re.MULTILINE)
_KEPT_LINE = re.compile(rf"^{KEPT}", re.MULTILINE)


class Uneditable(ValueError):
    """The file does not parse, or these values cannot be put into it."""


class Edit(Protocol):
    """An edit of a text."""

    def apply(self, text: str) -> str:
        """Put the values into a text. Raises Uneditable."""
        ...

    def restore(self, text: str, before: str) -> str:
        """Take the values out of a text that was `before` when they were put in. Raises Uneditable.

        Changes that were made since then stay.
        """
        ...

    def snippet(self) -> str:
        """The values alone, as the file would say them."""
        ...


def merged(old: object, new: object) -> object:
    """New values over old ones: objects key by key, new items of lists in front."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return {**old, **{key: merged(old.get(key), value) for key, value in new.items()}}
    if isinstance(old, list) and isinstance(new, list):
        return [*new, *old]
    return new


@dataclass(frozen=True, slots=True)
class JsonEdit:
    """Merges values into a JSON object; `defaults` only where the file says nothing of them."""

    values: Values
    defaults: Values

    def apply(self, text: str) -> str:
        """As `Edit`."""
        old = _json_object(text)
        new = merged({**self.defaults, **old}, self.values)
        found = re.search(r"\n([ \t]+)\"", text)
        edited = _json_text(new, found[1] if found else "  ")
        if self.restore(edited, text) != text:
            raise Uneditable(f"{', '.join(self.values)} cannot be merged with what it says")
        return edited if text.strip() and not text.endswith("\n") else f"{edited}\n"

    def restore(self, text: str, before: str) -> str:
        """As `Edit`."""
        current, old = _json_object(text), _json_object(before)
        given = merged(self.defaults, self.values)
        restored = _taken_out(current, given, old)
        if restored == old:
            return before
        found = re.search(r"\n([ \t]+)\"", text)
        return _json_text(restored, found[1] if found else "  ") + "\n"

    def snippet(self) -> str:
        """As `Edit`."""
        return self.apply("")


def _json_object(text: str) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise Uneditable("a key stands twice in one object")
        return found

    try:
        value = json.loads(text, object_pairs_hook=unique) if text.strip() else {}
    except (json.JSONDecodeError, RecursionError) as fault:
        raise Uneditable(f"it is no JSON: {fault}") from fault
    if not isinstance(value, dict):
        raise Uneditable("it is no JSON object")
    return value


def _json_text(value: object, indent: str) -> str:
    try:
        text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which only an escape can say
        return json.dumps(value, indent=indent)
    except ValueError as fault:
        raise Uneditable("a number in it is too large") from fault
    return text


def _taken_out(current: object, given: object, old: object) -> object:
    """The current value without the given ones, with the old ones in their places.

    What a key named OWN holds was given as a whole.
    """
    if not isinstance(current, Mapping) or not isinstance(given, Mapping):
        return old
    was = old if isinstance(old, Mapping) else {}
    found = dict(current)
    for key, value in given.items():
        if key not in found:
            continue
        rest = was.get(key) if key == OWN else _taken_out(found[key], value, was.get(key))
        if key in was or (isinstance(rest, Mapping) and rest):
            found[key] = rest
        else:
            del found[key]
    return found


@dataclass(frozen=True, slots=True)
class TextEdit(ABC):
    """Puts marked blocks into a text with `#` comments; subclasses say where.

    The values are single ones, tables of single ones, and lists of tables.
    """

    values: Values
    defaults: Values

    def apply(self, text: str) -> str:
        """As `Edit`."""
        old = self._parse(text)
        values = {**{k: v for k, v in self.defaults.items() if k not in old}, **self.values}
        edited = self._place(text, old, values)
        try:
            is_right = self._parse(edited) == merged(old, values)
        except Uneditable:
            is_right = False
        if not is_right or self.restore(edited, text) != text:
            said = ", ".join(values)
            raise Uneditable(f"{said} cannot be put into it without changing what else it says")
        return edited

    def restore(self, text: str, before: str) -> str:
        """As `Edit`."""
        found = _KEPT_LINE.sub("", _BLOCK.sub("", text))
        # A block behind a last line that had no end gave it one.
        return before if found == f"{before}\n" else found

    def snippet(self) -> str:
        """As `Edit`."""
        edited = self.apply("")
        return "".join(line for line in edited.splitlines(True) if line.strip() not in (BEGIN, END))

    @abstractmethod
    def _parse(self, text: str) -> Values:
        """What a text says. Raises Uneditable."""

    @abstractmethod
    def _place(self, text: str, old: Values, values: Values) -> str:
        """The text with the values in it, if its lines are usual ones."""


class TomlEdit(TextEdit):
    """Single values stand in a block in front of all tables, and tables in one at the end."""

    __slots__ = ()

    def _parse(self, text: str) -> Values:
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as fault:
            raise Uneditable(f"it is no TOML: {fault}") from fault

    def _place(self, text: str, old: Values, values: Values) -> str:
        single = [f"{key} = {_said(one)}" for key, one in values.items() if _is_single(one)]
        tables = [line for key, one in values.items() for line in _toml_table(key, one)]
        header = re.search(r"^[ \t]*\[", text, re.MULTILINE)
        head = text[: header.start()] if header else text
        kept = _kept(head, [key for key in values if key in old], "=")
        return _block(single) + _with_end(kept + text[len(head) :]) + _block(tables)


class YamlEdit(TextEdit):
    """Single values stand in a block at the end, and items of a list in front of its others."""

    __slots__ = ()

    def _parse(self, text: str) -> Values:
        import yaml

        try:
            value = yaml.safe_load(text)
        except (yaml.YAMLError, RecursionError, ValueError) as fault:
            raise Uneditable(f"it is no YAML: {' '.join(str(fault).split())}") from fault
        if value is not None and not isinstance(value, dict):
            raise Uneditable("it is no YAML mapping")
        return value or {}

    def _place(self, text: str, old: Values, values: Values) -> str:
        single = [f"{key}: {_said(one)}" for key, one in values.items() if _is_single(one)]
        text = _kept(text, [key for key in values if key in old and _is_single(values[key])], ":")
        for key, items in values.items():
            if not isinstance(items, list):
                continue
            place = re.search(rf"^{key}:[ \t]*(?:#.*)?\r?\n", text, re.MULTILINE)
            if place is None:  # absent or empty; else the check of `apply` fails
                text = _kept(text, [key] if key in old else [], ":")
                single += [f"{key}:", *_yaml_items(items, "  ")]
                continue
            first = re.compile(r"(?:[ \t]*(?:#.*)?\r?\n)*([ ]*)- ").match(text, place.end())
            block = _block(_yaml_items(items, first[1] if first else "  "))
            text = text[: place.end()] + block + text[place.end() :]
        return _with_end(text) + _block(single)


def _is_single(value: object) -> bool:
    return isinstance(value, str | int)


def _said(value: object) -> str:
    """A string or a number, or a list of them, as JSON, TOML and YAML all read it."""
    return json.dumps(value)


def _toml_table(key: str, value: object) -> Sequence[str]:
    """Lines of the tables in a value, each under its own header."""
    if not isinstance(value, Mapping):
        return ()
    single = [f"{name} = {_said(one)}" for name, one in value.items() if _is_single(one)]
    inner = [line for name, one in value.items() for line in _toml_table(f"{key}.{name}", one)]
    return [*([f"[{key}]", *single] if single else []), *inner]


def _yaml_items(items: Sequence[Mapping[str, object]], indent: str) -> list[str]:
    """Items of a list; a table in an item stands in one line."""
    return [
        f"{indent}{'  ' if place else '- '}{key}: {_said(value)}"
        for item in items
        for place, (key, value) in enumerate(item.items())
    ]


def _block(lines: Sequence[str]) -> str:
    return "\n".join([BEGIN, *lines, END, ""]) if lines else ""


def _with_end(text: str) -> str:
    return text if not text or text.endswith("\n") else f"{text}\n"


def _kept(text: str, keys: Sequence[str], sign: str) -> str:
    """Make comments of the lines that give these keys a value."""
    for key in keys:
        line = re.compile(rf"^(?=[\"']?{re.escape(key)}[\"']?[ \t]*{sign})", re.MULTILINE)
        text = line.sub(KEPT, text, count=1)
    return text


MakeEdit = Callable[[Values, Values], Edit]
