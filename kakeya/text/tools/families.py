"""The families of calls, and the one that a model writes, found by its chat template.

A package adds a family by an entry point of the group `kakeya.tool_families`: an object that is a
`ToolFamily`. It goes before the families here. One that cannot be loaded is left out, as the log
says.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Container, Iterator, Sequence
from importlib.metadata import entry_points

from kakeya.core.log import event
from kakeya.text.chat import Tool
from kakeya.text.tools.calls import Called, CallForm, ToolFamily, called, json_calls
from kakeya.text.tools.parser_files import TEMPLATE_FAMILIES, TOKEN_FAMILIES

_log = logging.getLogger(__name__)
ENTRY_POINTS = "kakeya.tool_families"


class JsonFamily:
    """One JSON object for each call: Hermes, Qwen and others, and tools written as plain text."""

    name = "json_tools"
    start = "<tool_call>"
    end = "</tool_call>"
    inner_marks: Sequence[str] = ()
    form = CallForm()

    def writes_for(self, template: str, vocabulary: Container[str]) -> bool:
        """As `ToolFamily`."""
        return self.start in template

    def parse(self, text: str, tools: Sequence[Tool]) -> list[Called]:
        """As `ToolFamily`."""
        return json_calls(text)


class BareJsonFamily:
    """The whole answer is a call, with no marks around it: Llama 3."""

    name = "llama3"
    start = '{"name":'
    end = ""
    inner_marks: Sequence[str] = ()
    form = CallForm(
        opening="", before=' "', between='", "parameters": ', closing="", joint='; {"name":'
    )

    def writes_for(self, template: str, vocabulary: Container[str]) -> bool:
        """As `ToolFamily`."""
        return '{"name": function name, "parameters":' in template

    def parse(self, text: str, tools: Sequence[Tool]) -> list[Called]:
        """As `ToolFamily`."""
        rest, calls = self.start + text.rstrip(), []
        while rest:
            try:
                value, at = _DECODER.raw_decode(rest)
            except RecursionError as fault:
                raise ValueError("the call is nested too deep") from fault
            if not isinstance(value, dict) or value.keys().isdisjoint(_ARGUMENTS):
                raise ValueError("an object with a name, and no call")  # no marks tell it from one
            calls.append(called(value))
            rest = rest[at:].lstrip("; \n")
        return calls


JSON_FAMILY: ToolFamily = JsonFamily()
_OURS = (*TEMPLATE_FAMILIES, BareJsonFamily(), JSON_FAMILY, *TOKEN_FAMILIES)
_DECODER = json.JSONDecoder()
_ARGUMENTS = ("parameters", "arguments")


@functools.cache
def tool_families() -> tuple[ToolFamily, ...]:
    """Every family that is installed, in the order in which they are tried.

    Those that a template tells of go before those that a vocabulary tells of.
    """
    return (*_added(), *_OURS)


def _added() -> Iterator[ToolFamily]:
    """The families of other packages, in the order of their names."""
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda one: one.name):
        try:
            yield point.load()
        except Exception as fault:  # noqa: BLE001 - foreign code
            event(
                _log,
                "family of tool calls left out",
                level=logging.WARNING,
                plugin=point.name,
                origin=point.value,
                error=str(fault) or repr(fault),
            )


def family_of(template: str, vocabulary: Container[str]) -> ToolFamily:
    """The family of a model; the JSON family where nothing tells of another."""
    found = (one for one in tool_families() if one.writes_for(template, vocabulary))
    return next(found, JSON_FAMILY)
