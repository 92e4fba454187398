"""Tools of a Responses request, and the form of the text that it asks for.

function     {"type": "function", "name", "description", "parameters", "strict"}
namespace    {"type": "namespace", "name", "description", "tools": [functions]}: the model calls
             its functions NAMESPACE__NAME; calls are told with both names
hosted       left out, which a warning tells: a node runs no tools
custom       refused: their input is free text, which models here have no form for
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kakeya.backends.request import ToolChoice
from kakeya.core.errors import InvalidArgument, Unsupported
from kakeya.gateway.http.body import refuse, shown, text
from kakeya.gateway.http.fields import is_one_of, refuse_unknown
from kakeya.gateway.openai.tools import (
    MAX_TOOLS,
    check_function,
    choose_tools,
    parse_tools,
    read_answer_schema,
)
from kakeya.text.chat import Tool

_HOSTED = (
    "web_search",  # of these with a suffix too: web_search_preview_2025_03_11
    "file_search",
    "code_interpreter",
    "computer",
    "mcp",
    "image_generation",
    "local_shell",
    "shell",
    "apply_patch",
    "tool_search",
    "programmatic_tool_calling",
)
_FIELDS = ("name", "description", "parameters", "strict")
"""What a model is shown of a function."""


class FunctionName(NamedTuple):
    """A function as its caller knows it; `namespace` "" = none."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTools:
    """Functions that the model is shown, what each is called by the caller, and their form in the
    request."""

    tools: tuple[Tool, ...]
    names: Mapping[str, FunctionName]
    given: tuple[object, ...]


def joined_name(namespace: str, name: str) -> str:
    """The name by which a model calls a function of a namespace."""
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


def read_tools(value: object, *, warn: Callable[[str], None]) -> NamedTools:
    """Read `tools`. Raises InvalidArgument or Unsupported."""
    if value is not None and (not isinstance(value, list) or len(value) > MAX_TOOLS):
        refuse("tools", value, f"a list of at most {MAX_TOOLS} tools")
    found: list[Tool] = []
    names: dict[str, FunctionName] = {}
    given: list[object] = []
    for index, tool in enumerate(value or ()):
        at = f"tools[{index}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind.startswith(_HOSTED):
            warn(f"{at} is left out: this node has no hosted tools ({kind})")
            continue
        given.append(tool)
        for namespace, function, place in _functions(tool, at):
            name = joined_name(namespace, str(function["name"]))
            origin = FunctionName(namespace, str(function["name"]))
            if names.setdefault(name, origin) != origin:
                raise InvalidArgument(
                    f"{place}.name is {shown(function['name'])}; another tool is called {name} too",
                    param=f"{place}.name",
                )
            found.append({"type": "function", "function": {**function, "name": name}})
    return NamedTools(tools=parse_tools(found), names=names, given=tuple(given))


def read_choice(body: Mapping[str, object], tools: NamedTools) -> ToolChoice:
    """Read `tool_choice` and `parallel_tool_calls`, of these tools. Raises InvalidArgument."""
    mode: Literal["auto", "none", "required"]
    chosen: list[str] = []
    match body.get("tool_choice"):
        case None:
            mode = "auto"
        case "auto" | "none" | "required" as word:
            mode = word
        case {"type": "allowed_tools", "mode": "auto" | "required" as word, "tools": [*listed]}:
            mode, chosen = word, [_chosen(one) for one in listed if not _is_hosted(one)]
            if not chosen:
                refuse("tool_choice.tools", listed, "a list with at least one function")
        case {"type": "function"} as one:
            mode, chosen = "required", [_chosen(one)]
        case other:
            function = '{"type": "function", "name": "..."}'
            allowed = '{"type": "allowed_tools", "mode": "auto" | "required", "tools": [...]}'
            refuse("tool_choice", other, f'"auto", "none", "required", {function} or {allowed}')
    return choose_tools(body, mode, chosen, tools.tools)


def read_text_form(value: object) -> Mapping[str, object] | None:
    """Read `text`: the JSON Schema of the answer, None for free text. Raises InvalidArgument or
    Unsupported."""
    if value is None:
        return None
    if not isinstance(value, dict):
        refuse("text", value, 'an object like {"format": {"type": "text"}}')
    refuse_unknown(value, frozenset({"format"}), {"verbosity": is_one_of("medium")}, "text.")
    form = value.get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        schema = form.get("schema")
        if not isinstance(schema, dict):
            refuse("text.format.schema", schema, "a JSON Schema object")
        return schema
    if form is not None and (not isinstance(form, dict) or form.get("type") not in _PLAIN_FORMS):
        refuse("text.format", form, '{"type": "text" | "json_object" | "json_schema", ...}')
    return read_answer_schema(form)


_PLAIN_FORMS = ("text", "json_object")


def _functions(tool: object, at: str) -> list[tuple[str, dict[str, object], str]]:
    """The functions of a tool, each with its namespace and its place."""
    if not isinstance(tool, dict):
        refuse(at, tool, 'a tool like {"type": "function", "name": "..."}')
    match tool:
        case {"type": "function"}:
            return [("", _function(tool, at), at)]
        case {"type": "namespace", "name": str(namespace), "tools": [*inner]}:
            found = []
            for index, one in enumerate(inner):
                place = f"{at}.tools[{index}]"
                if not isinstance(one, dict) or one.get("type") != "function":
                    refuse(place, one, 'a tool of type "function"')
                found.append((namespace, _function(one, place), place))
            if found and (told := tool.get("description")):
                # Models know no namespaces; the first function tells of its own.
                first = found[0][1]
                told = f"[{namespace}: {text(told, f'{at}.description')}]"
                first["description"] = f"{told} {first.get('description') or ''}".strip()
            return found
        case {"type": "namespace"}:
            return refuse(at, tool, "a namespace with a name and a list of tools")
        case {"type": kind}:
            raise Unsupported(
                f'{at}.type={shown(kind)} is not supported; a model here calls "function" tools',
                param=f"{at}.type",
            )
        case _:
            return refuse(f"{at}.type", None, '"function"')


def _function(tool: Mapping[str, object], at: str) -> dict[str, object]:
    check_function(tool, at)
    return {field: tool[field] for field in _FIELDS if tool.get(field) is not None}


def _is_hosted(one: object) -> bool:
    kind = one.get("type") if isinstance(one, dict) else None
    return isinstance(kind, str) and kind.startswith(_HOSTED)


def _chosen(one: object) -> str:
    if not isinstance(one, dict) or one.get("type") != "function" or not one.get("name"):
        refuse("tool_choice", one, 'a tool like {"type": "function", "name": "..."}')
    namespace = text(one.get("namespace") or "", "tool_choice.namespace")
    return joined_name(namespace, text(one["name"], "tool_choice.name"))
