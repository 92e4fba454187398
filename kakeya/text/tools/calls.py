"""Calls of tools, and what a family is: one syntax in which models write them.

A family is the marks around calls, what a parser makes of the text between them, and the form in
which a grammar forces a call. Every family reads calls in JSON beside its own syntax, so that a
grammar can ask for these where the syntax is not made of JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kakeya.text.chat import Tool

INDEX = "\0"
"""In a `CallForm`: the number of a call, counted from 0."""
_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
_NAME = re.compile(r"[\w.:/-]{1,128}")


@dataclass(frozen=True, slots=True)
class Called:
    """A call of a tool; `call_id` is the model's own, "" where it gives none."""

    name: str
    arguments: str
    """A JSON object, as text."""
    call_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """How a call is written whose arguments are JSON.

        start opening before NAME between ARGUMENTS after closing end

    Several calls stand in one pair of marks, `joint` between them; where it is None, each has its
    own pair, on a line of its own.
    """

    opening: str = "\n"
    before: str = '{"name": "'
    between: str = '", "arguments": '
    after: str = "}"
    closing: str = "\n"
    joint: str | None = None


class ToolFamily(Protocol):
    """A syntax of calls."""

    @property
    def name(self) -> str:
        """The name of the family."""
        ...

    @property
    def start(self) -> str:
        """The mark in front of a call."""
        ...

    @property
    def end(self) -> str:
        """The mark behind a call; "" where a call goes on to the end of the answer."""
        ...

    @property
    def inner_marks(self) -> Sequence[str]:
        """Texts inside a call that may be special tokens."""
        ...

    @property
    def form(self) -> CallForm:
        """How a grammar writes a call."""
        ...

    def writes_for(self, template: str, vocabulary: Container[str]) -> bool:
        """Whether a model with this chat template and these tokens writes its calls so."""
        ...

    def parse(self, text: str, tools: Sequence[Tool]) -> list[Called]:
        """Read the text between two marks, at least one call. Raises ValueError, also for ""
        without tools, which is read once when a model's files are."""
        ...


def json_calls(text: str) -> list[Called]:
    """Read one call in JSON, or a list of them. Raises ValueError."""
    try:
        value = json.loads(text)
        calls = [called(one) for one in (value if isinstance(value, list) else [value])]
    except RecursionError as fault:
        raise ValueError("the call is nested too deep") from fault
    if not calls:
        raise ValueError("the list of calls is empty")
    return calls


def called(value: object) -> Called:
    """Take a call as parsers give it; one without arguments names nothing but itself. Raises
    ValueError for what is none."""
    if not isinstance(value, dict):
        raise ValueError(f"{type(value).__name__} is no call")  # noqa: TRY004 - text, not a slip
    nothing: object = {} if value.keys() <= {"name", "id", "type"} else None
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", nothing))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(arguments, dict):
        raise ValueError("a call is a name and an object of arguments")
    call_id = value.get("id")
    return Called(name, _text(arguments), call_id if isinstance(call_id, str) else "")


def _text(arguments: Mapping[str, object]) -> str:
    """Arguments as JSON text that UTF-8 can carry: a lone surrogate stays an escape."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return json.dumps(arguments) if _LONE_SURROGATE.search(text) else text


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTool:
    """A function of a request's tools."""

    name: str
    parameters: Mapping[str, object]
    is_strict: bool
    at: str
    """The place of its parameters in the request, as errors name it."""


def functions_of(tools: Iterable[Tool]) -> list[FunctionTool]:
    """The functions among tools, whether they stand in a field `function` or not."""
    found = []
    for index, tool in enumerate(tools):
        inner = tool.get("function")
        told = inner if isinstance(inner, Mapping) else tool
        name, parameters = told.get("name"), told.get("parameters")
        if not isinstance(name, str):
            continue
        at = f"tools[{index}].function" if told is inner else f"tools[{index}]"
        found.append(
            FunctionTool(
                name=name,
                parameters=parameters if isinstance(parameters, Mapping) else {"type": "object"},
                is_strict=told.get("strict") is True,
                at=f"{at}.parameters",
            )
        )
    return found
