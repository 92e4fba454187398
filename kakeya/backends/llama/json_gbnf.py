"""JSON schemas as rules of GBNF, the grammars of llama.cpp. Pure.

What the rules accept validates; they may accept less, as no property beside those that are named.
The separators are those of `kakeya.text.grammar`: ", " and ": ", and no other white space. A
keyword that the rules cannot follow is refused, and never left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence

from kakeya.core.errors import Unsupported

MOST_REPEATS = 2000
"""llama.cpp takes so many repetitions of one thing."""
REMARKS = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$id", "$comment", "$defs", "definitions", "x-guidance"),
    }
)
_OF_TYPE = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "string": {"minLength", "maxLength"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": {"minimum", "maximum"},
    "boolean": set[str](),
    "null": set[str](),
}
_OF_NAMES, _OF_LISTS = (
    ("properties", "$defs", "definitions"),
    ("anyOf", "oneOf", "allOf", "prefixItems"),
)
_OF_COMPOSED = {*_OF_LISTS, "type", "enum", "const", "$ref", "pattern", "format"}
_FORMATS = {"date", "time", "date-time", "uuid"}
_DIGITS = 15
_FRACTION = f'("." [0-9]{{1,{_DIGITS}}})?'
_SHARED = {
    "char": r'[^"\\\x00-\x1f\x7f] | "\\" ["\\bfnrt]',
    "string": r'"\"" char* "\""',
    "integer": f'"-"? ("0" | [1-9] [0-9]{{0,{_DIGITS}}})',
    "number": f"integer {_FRACTION} ([eE] [-+]? [0-9]{{1,2}})?",
    "value": 'object | array | string | number | "true" | "false" | "null"',
    "object": '"{" (string ": " value (", " string ": " value)*)? "}"',
    "array": '"[" (value (", " value)*)? "]"',
}
_NEEDS = {
    "string": ("char",),
    "number": ("integer",),
    "value": ("object", "array", "string", "number"),
    "object": ("string", "value"),
    "array": ("value",),
}


class SchemaRules:
    """The rules of one grammar; `add` returns the name of a schema's rule."""

    def __init__(self) -> None:
        self.rules: dict[str, str] = {}
        self._root: Mapping[str, object] = {}
        self._named: dict[str, str] = {}
        self._made = 0

    def add(self, schema: Mapping[str, object]) -> str:
        """Add the rules of a schema, whose references are to its own parts.

        Raises Unsupported that names the keyword.
        """
        self._root, self._named = schema, {}
        return self._rule(schema)

    def _rule(self, schema: object) -> str:
        name = self._new()
        self.rules[name] = ""  # its place, in front of its parts
        self.rules[name] = self._body(schema)
        return name

    def _new(self) -> str:
        self._made += 1
        return f"json-{self._made}"

    def _body(self, schema: object) -> str:
        """The right side of the rule of a schema."""
        if schema is True:
            return self._shared("value")
        if not isinstance(schema, Mapping):
            raise _cannot(f"is {json.dumps(schema)[:80]}")
        match schema:
            case {"$ref": str(path)}:
                _refuse(schema, {"$ref"})
                return self._reference(path)
            case {"const": value}:
                _refuse(schema, {"const", "type"})
                return quoted(_text(value))
            case {"enum": [_, *_] as values}:
                _refuse(schema, {"enum", "type"})
                return " | ".join(quoted(_text(value)) for value in values)
            case {"anyOf": [_, *_] as parts} | {"oneOf": [_, *_] as parts}:
                _refuse(schema, {"anyOf", "oneOf"})
                return " | ".join(self._rule(part) for part in parts)
            case {"type": [_, *_] as types}:
                return " | ".join(self._rule(_narrowed(schema, one)) for one in types)
            case {"type": str(kind)} if kind in _OF_TYPE:
                return self._typed(kind, schema)
            case _ if schema.keys() <= REMARKS:
                return self._shared("value")
            case _ if {"properties", "required", "additionalProperties"} & schema.keys():
                return self._typed("object", schema)
            case _:
                raise _cannot(f"is {json.dumps(schema)[:80]}")

    def _typed(self, kind: str, schema: Mapping[str, object]) -> str:
        _refuse(schema, {"type", *_OF_TYPE[kind]})
        match kind:
            case "object":
                return self._object(schema)
            case "array":
                return self._array(schema)
            case "string" if schema.keys() & _OF_TYPE["string"]:
                self._shared("string")
                return f'"\\"" char{_times(schema, "minLength", "maxLength")} "\\""'
            case "integer" | "number" if schema.keys() & _OF_TYPE[kind]:
                return _bounded(schema, is_whole=kind == "integer")
            case "boolean":
                return '"true" | "false"'
            case "null":
                return '"null"'
            case _:
                return self._shared(kind)

    def _object(self, schema: Mapping[str, object]) -> str:
        """Named properties in their order, those that are not required may be missing; without any
        named, any names."""
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        others = schema.get("additionalProperties", True)
        if not isinstance(properties, Mapping) or not isinstance(required, Sequence):
            raise _cannot("has properties that are none")
        parts = {**properties, **{str(one): others for one in required if one not in properties}}
        if not parts:
            if others is False:
                return '"{}"'
            self._shared("string")
            pair = f'string ": " {self._rule(others)}'
            return f'"{{" ({pair} (", " {pair})*)? "}}"'
        pairs = {
            key: f"{quoted(_text(key) + ': ')} {self._rule(part)}" for key, part in parts.items()
        }
        rest, firsts = "", list[str]()
        for key in reversed(pairs):
            follows = rest
            firsts = [f"{pairs[key]} {follows}", *([] if key in required else firsts)]
            rest = self._new()
            joined = f'", " {pairs[key]}'
            self.rules[rest] = f"{joined if key in required else f'({joined})?'} {follows}"
        inner = " | ".join(firsts)
        return f'"{{" ({inner}){"" if set(required) & pairs.keys() else "?"} "}}"'

    def _array(self, schema: Mapping[str, object]) -> str:
        least, most = _count(schema, "minItems") or 0, _count(schema, "maxItems")
        if most == 0:
            return '"[]"'
        item = self._rule(schema.get("items", True))
        upper = "" if most is None else str(most - 1)
        more = f'{item} (", " {item}){{{max(0, least - 1)},{upper}}}'
        return f'"[" {more if least else f"({more})?"} "]"'

    def _reference(self, path: str) -> str:
        if path not in self._named:
            self._named[path] = self._new()
            self.rules[self._named[path]] = ""
            self.rules[self._named[path]] = self._body(self._at(path))
        return self._named[path]

    def _at(self, path: str) -> object:
        found: object = self._root
        for step in path.removeprefix("#").split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if not path.startswith("#") or not isinstance(found, Mapping) or step not in found:
                raise _cannot(f"refers to {path[:80]}, which is not there")
            found = found[step]
        return found

    def _shared(self, name: str) -> str:
        """A rule that all schemas share, and what it is made of."""
        if name not in self.rules:
            self.rules[name] = _SHARED[name]
            for other in _NEEDS.get(name, ()):
                self._shared(other)
        return name


def is_followed(schema: object) -> bool:
    """Whether llama-server itself, which makes rules of more keywords, leaves none of a schema
    out."""
    if not isinstance(schema, Mapping):
        return isinstance(schema, bool)
    known = REMARKS.union(_OF_COMPOSED, *_OF_TYPE.values())
    has_bounds = schema.get("type") != "integer" and schema.keys() & _OF_TYPE["integer"]
    if schema.keys() - known or has_bounds or schema.get("format", "date") not in _FORMATS:
        return False
    named = [part.values() for key in _OF_NAMES if isinstance(part := schema.get(key), Mapping)]
    listed = [part for key in _OF_LISTS if isinstance(part := schema.get(key), Sequence)]
    inner = [schema.get(key, True) for key in ("items", "additionalProperties")]
    return all(is_followed(one) for part in (*named, *listed, inner) for one in part)


def quoted(text: str) -> str:
    """A text as GBNF writes it."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(one if one >= " " else f"\\x{ord(one):02x}" for one in escaped) + '"'


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _narrowed(schema: Mapping[str, object], kind: object) -> Mapping[str, object]:
    """A schema of several types with one of them, and the keywords that are of that."""
    others = set().union(*_OF_TYPE.values()) - _OF_TYPE.get(str(kind), set())
    return {**{key: part for key, part in schema.items() if key not in others}, "type": kind}


def _refuse(schema: Mapping[str, object], known: Iterable[str]) -> None:
    unknown = sorted(schema.keys() - REMARKS - set(known))
    if unknown:
        raise _cannot(f"uses {unknown[0]!r}")


def _cannot(what: str) -> Unsupported:
    return Unsupported(f"a schema {what}, which cannot be forced of a GGUF model; leave it out")


def _count(schema: Mapping[str, object], keyword: str) -> int | None:
    value = schema.get(keyword)
    if isinstance(value, int) and value > MOST_REPEATS:
        raise _cannot(f"has a {keyword} of {value}, above {MOST_REPEATS}")
    return value if isinstance(value, int) else None


def _times(schema: Mapping[str, object], least: str, most: str) -> str:
    upper = _count(schema, most)
    return f"{{{_count(schema, least) or 0},{'' if upper is None else upper}}}"


def _bounded(schema: Mapping[str, object], *, is_whole: bool) -> str:
    """Numbers between bounds, which are whole."""
    low, high = -(10**_DIGITS), 10**_DIGITS
    for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        bound = schema.get(keyword)
        if bound is None:
            continue
        if not isinstance(bound, int | float) or (not is_whole and bound != int(bound)):
            raise _cannot(f"has a {keyword} of {bound}")
        is_strict = keyword.startswith("exclusive")
        if keyword.endswith("inimum"):
            low = max(low, math.floor(bound) + 1 if is_strict else math.ceil(bound))
        else:
            high = min(high, math.ceil(bound) - 1 if is_strict else math.floor(bound))
    if low > high:
        raise _cannot(f"allows no number from {low} to {high}")
    parts = []
    if low < 0:
        parts.append(f'"-" ({_magnitudes(max(0, -high), -low, is_whole=is_whole)})')
    if high >= 0:
        parts.append(_magnitudes(max(0, low), high, is_whole=is_whole))
    return " | ".join(parts)


def _magnitudes(low: int, high: int, *, is_whole: bool) -> str:
    if is_whole:
        return _whole(low, high)
    below = f"({_whole(low, high - 1)}) {_FRACTION} | " if low < high else ""
    return f'{below}{quoted(str(high))} ("." "0")?'


def _whole(low: int, high: int) -> str:
    """Whole numbers from `low`, not below 0, to `high`, by their count of digits."""
    found = []
    for digits in range(len(str(low)), len(str(high)) + 1):
        least = 0 if digits == 1 else 10 ** (digits - 1)
        found.append(_digits(str(max(low, least)), str(min(high, 10**digits - 1))))
    return " | ".join(found)


def _digits(low: str, high: str) -> str:
    """The numbers from `low` to `high`, which have as many digits."""
    first, last, rest = int(low[0]), int(high[0]), len(low) - 1
    if not rest:
        return f"[{first}-{last}]"
    if first == last:
        return f'"{first}" ({_digits(low[1:], high[1:])})'
    found = []
    if low[1:] != "0" * rest:
        found.append(f'"{first}" ({_digits(low[1:], "9" * rest)})')
        first += 1
    if high[1:] != "9" * rest:
        found.append(f'"{last}" ({_digits("0" * rest, high[1:])})')
        last -= 1
    if first <= last:
        found.append(f"[{first}-{last}] [0-9]{{{rest}}}")
    return " | ".join(found)
