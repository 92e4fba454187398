"""Messages and metadata from the arguments that a program gives to our Python interfaces."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kakeya.core.errors import InvalidArgument

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made", bound=Message)

METADATA_CHARACTERS = 1024
"""Servers may refuse a call with more than 8 KiB of metadata in all."""
_WORDS = {
    FieldDescriptor.TYPE_BOOL: "true or false",
    FieldDescriptor.TYPE_FLOAT: "a number",
    FieldDescriptor.TYPE_STRING: "text that UTF-8 can hold",
    FieldDescriptor.TYPE_UINT32: f"a whole number in 0..{2**32 - 1}",
    FieldDescriptor.TYPE_UINT64: f"a whole number in 0..{2**64 - 1}",
}


def fitted(kind: Callable[_Given, _Made], *args: _Given.args, **fields: _Given.kwargs) -> _Made:
    """Make a message of these fields.

    Raises InvalidArgument with the field, its value and its type: an error of protobuf names no
    field.
    """
    try:
        return kind(*args, **fields)
    except (TypeError, ValueError) as error:
        message = cast("type[_Made]", kind)()
        for name, value in fields.items():
            if (reason := _misfit(message, name, value)) is not None:
                raise InvalidArgument(reason, param=name) from error
        raise InvalidArgument(f"{message.DESCRIPTOR.name}: {error}") from error


def in_metadata(name: str, text: str) -> str:
    """Return the text if metadata can carry it.

    Raises InvalidArgument if not; the error of gRPC says only "Invalid metadata".
    """
    if not (text.isascii() and text.isprintable()):
        raise InvalidArgument(
            f"{name} is {reprlib.repr(text)}, it must be of printable ASCII characters", param=name
        )
    if len(text) > METADATA_CHARACTERS:
        raise InvalidArgument(
            f"{name} has {len(text)} characters, it must have at most {METADATA_CHARACTERS}",
            param=name,
        )
    return text


def _misfit(message: Message, name: str, value: object) -> str | None:
    field = message.DESCRIPTOR.fields_by_name[name]
    holds = _WORDS.get(field.type, "of its type")
    if not field.is_repeated:
        if _fits(message, name, value):
            return None
        return f"{name} is {reprlib.repr(value)}, it must be {holds}"
    if not isinstance(value, Iterable):
        return f"{name} is {reprlib.repr(value)}, it must be a list, each of it {holds}"
    for at, one in enumerate(value):
        if not _fits(message, name, [one]):
            return f"{name}[{at}] is {reprlib.repr(one)}, it must be {holds}"
    return None


def _fits(message: Message, name: str, value: object) -> bool:
    try:
        type(message)(**{name: value})
    except (TypeError, ValueError):
        return False
    return True
