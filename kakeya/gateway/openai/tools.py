"""Tools and schemas of an OpenAI request: what the model may, must or cannot call, and the form of
its answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Literal, cast

from kakeya.backends.request import ToolChoice
from kakeya.core.errors import InvalidArgument, Unsupported
from kakeya.gateway.http.body import flag, refuse, shown, text
from kakeya.gateway.http.fields import IS_TEXT, flag_field, opaque, table, value_field
from kakeya.text.chat import Tool

MAX_TOOLS = 1024
_NAME = "^[A-Za-z0-9_.:/-]{1,128}$"
_FORMATS = ("text", "json_object", "json_schema")


def read_tool_choice(body: Mapping[str, object], tools: Sequence[Tool]) -> ToolChoice:
    """Read `tool_choice` and `parallel_tool_calls`, of these tools. Raises InvalidArgument."""
    return choose_tools(body, *_mode(body.get("tool_choice")), tools)


def choose_tools(
    body: Mapping[str, object],
    mode: Literal["auto", "none", "required"],
    names: Sequence[str],
    tools: Sequence[Tool],
) -> ToolChoice:
    """Check a mode and names against the tools, and read `parallel_tool_calls`. Raises
    InvalidArgument."""
    if not tools and (mode == "required" or names):
        raise InvalidArgument(
            f"tool_choice is {shown(body['tool_choice'])}, and there are no tools; give tools",
            param="tool_choice",
        )
    known = {name_of(tool) for tool in tools}
    for name in names:
        if name not in known:
            raise InvalidArgument(
                f"tool_choice names {shown(name)}; the tools are {', '.join(sorted(known))[:200]}",
                param="tool_choice",
            )
    is_parallel = flag(body, "parallel_tool_calls")
    if body.get("parallel_tool_calls") is None:
        # A small model that must call goes on calling, and a client that forces a call takes one.
        is_parallel = mode == "auto"
    return ToolChoice(mode=mode, names=tuple(names), is_parallel=is_parallel)


def parse_tools(value: object) -> tuple[Tool, ...]:
    """Read functions that a model may call. Raises InvalidArgument or Unsupported."""
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        refuse("tools", value, f"a list of at most {MAX_TOOLS} tools")
    for index, tool in enumerate(value):
        _check_tool(tool, f"tools[{index}]")
    tools: list[Tool] = json.loads(text(json.dumps(value, ensure_ascii=False), "tools"))
    return tuple(tools)


def name_of(tool: Tool) -> str:
    """The name of a tool's function."""
    return cast("Mapping[str, str]", tool["function"])["name"]


def read_answer_schema(value: object) -> Mapping[str, object] | None:
    """Read `response_format`: the JSON Schema of the answer, None for free text."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in _FORMATS:
        refuse("response_format", value, '{"type": "text" | "json_object" | "json_schema", ...}')
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    named = value.get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(schema, dict):
        at = "response_format.json_schema"
        refuse(f"{at}.schema" if isinstance(named, dict) else at, schema, "a JSON Schema object")
    return schema


def _mode(value: object) -> tuple[Literal["auto", "none", "required"], tuple[str, ...]]:
    match value:
        case None:
            return "auto", ()
        case "auto" | "none" | "required":
            return value, ()
        case {"type": "function", "function": {"name": name}}:
            return "required", (text(name, "tool_choice.function.name"),)
        case {"type": "allowed_tools", "allowed_tools": dict(allowed)}:
            return _allowed(allowed)
        case _:
            choices = '"auto", "none", "required"'
            named = '{"type": "function", "function": {"name": "..."}}'
            return refuse("tool_choice", value, f"{choices} or {named}")


def _allowed(value: Mapping[str, object]) -> tuple[Literal["auto", "required"], tuple[str, ...]]:
    mode, tools = value.get("mode"), value.get("tools")
    if mode not in ("auto", "required"):
        refuse("tool_choice.allowed_tools.mode", mode, '"auto" or "required"')
    if not isinstance(tools, list) or not tools:
        refuse("tool_choice.allowed_tools.tools", tools, "a list of tools")
    for index, tool in enumerate(tools):
        _check_tool(tool, f"tool_choice.allowed_tools.tools[{index}]")
    return mode, tuple(map(name_of, tools))


def _check_tool(tool: object, at: str) -> None:
    if not isinstance(tool, dict):
        refuse(at, tool, "an object")
    if tool.get("type") != "function":
        kind = tool.get("type")
        if kind is None:
            refuse(f"{at}.type", kind, '"function"')
        raise Unsupported(
            f'{at}.type={shown(kind)} is not supported; a model here calls "function" tools',
            param=f"{at}.type",
        )
    function = tool.get("function")
    if not isinstance(function, dict):
        refuse(f"{at}.function", function, "an object with name and parameters")
    check_function(function, f"{at}.function")


def check_function(function: Mapping[str, object], at: str) -> None:
    """Check what a function is called and takes. Raises InvalidArgument."""
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not re.fullmatch(_NAME, name):
        refuse(f"{at}.name", name, "a name of letters, digits and . _ : / -")
    if parameters is not None and not isinstance(parameters, dict):
        refuse(f"{at}.parameters", parameters, "a JSON Schema object")


_FUNCTION = {
    "type": "object",
    "properties": {
        "name": {**IS_TEXT, "pattern": _NAME},
        "parameters": {"type": ["object", "null"]},
    },
    "required": ["name"],
}
_TOOL = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
    "required": ["type", "function"],
}
TOOLS = value_field("tools", parse_tools, {"type": "array", "maxItems": MAX_TOOLS, "items": _TOOL})
RESPONSE_FORMAT = value_field(
    "response_format",
    read_answer_schema,
    {
        "type": "object",
        "properties": {"type": {"enum": list(_FORMATS)}},
        "required": ["type"],
    },
)
TOOL_PARAMS = table(TOOLS, RESPONSE_FORMAT, flag_field("parallel_tool_calls"))
TOOL_PARAMS |= opaque("tool_choice")
