"""The fields of a request body, each declared once: its name, how it is read, and its JSON Schema.

A route's fields are a table by name. The table says which names are known, and the node's OpenAPI
document is made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kakeya.core.errors import Unsupported
from kakeya.gateway.http.body import UnknownParameters, flag, integer, number, refuse, shown, text

Read = TypeVar("Read", covariant=True)
_Value = TypeVar("_Value")
Schema = Mapping[str, object]
NoOps = Mapping[str, Callable[[object], bool]]
"""Parameters that are taken where their value changes nothing, which the function tells."""
IS_FLAG: Schema = {"type": "boolean"}
IS_TEXT: Schema = {"type": "string"}


@dataclass(frozen=True, slots=True)
class Field(Generic[Read]):
    """A parameter of a body. `read` takes the whole body, where null is as absent, and raises
    InvalidArgument or Unsupported; `schema` is that of a value that is given."""

    name: str
    read: Callable[[Mapping[str, object]], Read]
    schema: Schema
    is_required: bool = False


Fields = Mapping[str, Field[object]]


def table(*fields: Field[object]) -> dict[str, Field[object]]:
    """The fields by name."""
    return {one.name: one for one in fields}


def opaque(*names: str) -> dict[str, Field[object]]:
    """Fields that are read as a whole with others, and of whose values no schema is told."""
    return table(*(value_field(name, lambda value: value, {}) for name in names))


def value_field(
    name: str, parse: Callable[[object], _Value], schema: Schema, *, is_required: bool = False
) -> Field[_Value]:
    """A field that a function of its value reads; None = absent."""
    return Field(name, lambda body: parse(body.get(name)), schema, is_required)


def integer_field(name: str, low: int, high: int) -> Field[int | None]:
    """An integer in low..high."""
    schema = {"type": "integer", "minimum": low, "maximum": high}
    return Field(name, lambda body: integer(body, name, low, high, default=None), schema)


def number_field(name: str, low: float, high: float) -> Field[float | None]:
    """A number in low..high."""
    schema = {"type": "number", "minimum": low, "maximum": high}
    return Field(name, lambda body: number(body, name, low, high, default=None), schema)


def flag_field(name: str) -> Field[bool]:
    """A truth value; absent is false."""
    return Field(name, lambda body: flag(body, name), IS_FLAG)


def text_field(name: str) -> Field[str]:
    """A text; absent is ""."""
    return value_field(name, lambda value: "" if value is None else text(value, name), IS_TEXT)


def choice_field(name: str, choices: Sequence[str]) -> Field[str | None]:
    """One of several words."""

    def parse(value: object) -> str | None:
        if value is not None and (not isinstance(value, str) or value not in choices):
            refuse(name, value, f"one of {', '.join(choices)}")
        return value

    return value_field(name, parse, {"enum": list(choices)})


@dataclass(frozen=True, slots=True)
class _OneOf:
    values: tuple[object, ...]

    def __call__(self, given: object) -> bool:
        return any(type(given) is type(value) and given == value for value in self.values)


def is_one_of(*values: object) -> Callable[[object], bool]:
    """Whether a value is one of these; true is not 1."""
    return _OneOf(values)


def is_object(given: object) -> bool:
    """Whether a value is a JSON object."""
    return isinstance(given, dict)


def refuse_unknown(
    body: Mapping[str, object], known: Collection[str], no_ops: NoOps, prefix: str = ""
) -> None:
    """Raise UnknownParameters for those that are not known, and Unsupported for a value that
    changes something, of those that `no_ops` takes otherwise; null is as absent. Errors name a
    field behind the prefix: that of an object in the body."""
    given = {name: value for name, value in body.items() if value is not None and name not in known}
    for name, value in given.items():
        if name in no_ops and not no_ops[name](value):
            param = prefix + name
            raise Unsupported(
                f"{param}={shown(value)} is not supported; leave it out or give its default",
                param=param,
            )
    if unknown := [name for name in given if name not in no_ops]:
        raise UnknownParameters(unknown, prefix)


def body_schema(fields: Fields, no_ops: NoOps, *, takes_more: bool) -> Schema:
    """The JSON Schema of a body; `takes_more` = unknown parameters are no error."""
    given = {name: one.schema for name, one in fields.items()}
    given |= {name: _no_op_schema(check) for name, check in no_ops.items() if name not in given}
    required = [one.name for one in fields.values() if one.is_required]
    return {
        "type": "object",
        "properties": {
            name: schema if name in required or not schema else _or_null(schema)
            for name, schema in sorted(given.items())
        },
        "required": required,
        "additionalProperties": True if takes_more else {"type": "null"},
    }


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _no_op_schema(check: Callable[[object], bool]) -> Schema:
    if isinstance(check, _OneOf):
        return {"enum": list(check.values)}
    return {"type": "object"} if check is is_object else {}
