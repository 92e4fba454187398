"""A JSON request body and its fields: read strictly, refused in a sentence that names the field."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, TypeVar, cast

from kakeya.core.errors import InvalidArgument, Unsupported

Parsed = TypeVar("Parsed")
_Default = TypeVar("_Default", int, float, None)
OFFLOAD_BYTES = 64 * 1024
"""Longer bodies are read in a thread: of the smallest objects it takes 10 ms to read so many."""
MAX_DEPTH = 128
"""Of lists and objects within each other. A body is also written and rendered, by recursive code
that has room for fewer levels than the reader."""
MAX_DIGITS = 4000
"""Of an integer; Python reads few more, and says so in words of its own."""
_HALF = re.compile("[\ud800-\udfff]")
_TOO_DEEP = "the body is nested too deeply; no parameter needs it"


class UnknownParameters(Unsupported):
    """A route has no parameters of these names, or an object in its body no such fields.

    `names` are those of parameters, without which a request can be read.
    """

    def __init__(self, names: Sequence[str], prefix: str = "") -> None:
        listed = ", ".join(shown(prefix + name) for name in names[:8])
        verb, it = ("is", "it") if len(names) == 1 else ("are", "them")
        super().__init__(f"{listed} {verb} not supported; leave {it} out", param=prefix + names[0])
        self.names = () if prefix else tuple(names)


async def parse_body(body: bytes, parse: Callable[[Mapping[str, object]], Parsed]) -> Parsed:
    """Read a body and what it asks for; a large one in a thread. Raises InvalidArgument and what
    `parse` raises."""
    if len(body) <= OFFLOAD_BYTES:
        return parse(parse_json(body))
    return await asyncio.to_thread(lambda: parse(parse_json(body)))


def parse_json(body: bytes) -> dict[str, object]:
    """Read a body that must be one JSON object: UTF-8, no NaN, no key twice, not too deep."""
    try:
        parsed = json.loads(
            body.decode("utf-8-sig"),
            parse_constant=_refuse_constant,
            parse_int=_integer,
            object_pairs_hook=_without_duplicates,
        )
    except UnicodeDecodeError as fault:
        raise InvalidArgument(f"the body is not UTF-8 at byte {fault.start}") from fault
    except RecursionError as fault:
        raise InvalidArgument(_TOO_DEEP) from fault
    except ValueError as fault:
        raise InvalidArgument(f"the body is not valid JSON: {fault}") from fault
    if not isinstance(parsed, dict):
        raise InvalidArgument(f"the body must be a JSON object, not {_kind(parsed)}")
    if is_deeper(parsed, MAX_DEPTH):
        raise InvalidArgument(f"{_TOO_DEEP}: at most {MAX_DEPTH} levels")
    return parsed


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits; no parameter needs over {MAX_DIGITS}")
    return int(digits)


def shown(value: object) -> str:
    """A value as an error message quotes it: JSON, cut to 60 characters."""
    try:
        quoted = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        quoted = type(value).__name__
    return quoted if len(quoted) <= 60 else quoted[:57] + "..."


def text(value: object, at: str) -> str:
    """Read a string that UTF-8 can carry: U+FFFD stands for each half of a surrogate pair, which
    clients leave where they cut a text in the middle of a character."""
    if not isinstance(value, str):
        refuse(at, value, "a string")
    return value if value.isascii() else _HALF.sub("\ufffd", value)


def flag(body: Mapping[str, object], name: str, prefix: str = "") -> bool:
    """Read a truth value; absent is false."""
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        refuse(prefix + name, value, "true or false")
    return value


def object_of(body: Mapping[str, object], name: str) -> Mapping[str, object]:
    """Read an object; absent is empty."""
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        refuse(name, value, "an object")
    return value or {}


def integer(
    body: Mapping[str, object], name: str, low: int, high: int, *, default: _Default
) -> int | _Default:
    """Read an integer in low..high; true and 1.0 are none."""
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        refuse(name, value, f"an integer from {low} to {high}")
    return value


def number(
    body: Mapping[str, object], name: str, low: float, high: float, *, default: _Default
) -> float | _Default:
    """Read a number in low..high; true is none."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        refuse(name, value, f"a number from {low} to {high}")
    if not low <= value <= high:  # false for NaN and infinities too
        refuse(name, value, f"a number from {low} to {high}")
    return float(value)


def refuse(name: str, value: object, wanted: str) -> NoReturn:
    """Raise InvalidArgument: the name, what was given, what would be right."""
    given = "is missing" if value is None else f"is {shown(value)}"
    raise InvalidArgument(f"{name} {given}; it must be {wanted}", param=name)


def is_deeper(value: object, levels: int = MAX_DEPTH) -> bool:
    """Whether lists and objects lie in each other more than `levels` deep."""
    level = [value]
    for _ in range(levels):
        level = [
            inner
            for outer in level
            for inner in (
                outer.values() if isinstance(outer, dict) else cast("list[object]", outer)
            )
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _without_duplicates(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {shown(name)} occurs twice")
        found[name] = value
    return found


def _kind(value: object) -> str:
    kinds = {list: "a list", str: "a string", bool: "a truth value", type(None): "null"}
    return kinds.get(type(value), "a number")
