"""Anthropic's dialect, inbound: a body of POST /v1/messages to a request, or an error that names
the parameter.

    honoured      model, messages, system, max_tokens, temperature (0..1), top_p, top_k,
                  stop_sequences, stream, tools, tool_choice, thinking.type, output_config (effort,
                  format), output_format; metadata.user_id: the user, as for `share_params`
    absent        of sampling and thinking: what the model does of itself
    extensions    those of OpenAI's chats: seed, min_p, the penalties, draft_policy, deadline_s,
                  resumable, chat_template_kwargs, priority, conversation_id and the prompt_cache
                  parameters
    accepted      cache_control: prompts have cuts at the end of the system's text and before each
                  message of the user's anyway; thinking.budget_tokens and display; service_tier,
                  speed "standard", and what names an account, a place or an earlier answer;
                  headers as anthropic-beta and anthropic-version
    left out      tools that Anthropic's servers run or whose schema only its models know, and
                  context_management: the header x-kakeya-warning says so
    refused       everything else: 400, as images and documents are

Messages are read by `messages`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from kakeya.backends.request import ChatRequest, ToolChoice
from kakeya.core.errors import InvalidArgument
from kakeya.gateway.anthropic.messages import read_messages
from kakeya.gateway.anthropic.reply import MessageReply
from kakeya.gateway.http.body import flag, object_of, refuse, shown, text
from kakeya.gateway.http.fields import (
    NoOps,
    integer_field,
    is_object,
    is_one_of,
    number_field,
    opaque,
    refuse_unknown,
    table,
)
from kakeya.gateway.openai.generation_params import GENERATION_PARAMS, MOST_INT, read_stops
from kakeya.gateway.openai.requests import (
    read_params,
    read_template_args,
)
from kakeya.gateway.openai.share_params import read_user
from kakeya.gateway.openai.tools import MAX_TOOLS, check_function, read_tool_choice
from kakeya.text.chat import Chat, Tool


def _is_text(given: object) -> bool:
    return isinstance(given, str)


_OTHER_NAMES = ("stop", "service_tier", "user", "safety_identifier")
_OF_CHATS = {name: one for name, one in GENERATION_PARAMS.items() if name not in _OTHER_NAMES}
"""Parameters that mean what they mean in OpenAI's chats."""
_TEMPERATURE, _MAX_TOKENS = (
    number_field("temperature", 0, 1),
    integer_field("max_tokens", 1, MOST_INT),
)
MESSAGE = (
    _OF_CHATS
    | table(_TEMPERATURE, _MAX_TOKENS)
    | opaque("messages", "system", "stop_sequences", "tools", "tool_choice", "thinking")
    | opaque("output_config", "output_format", "metadata", "context_management")
    | opaque("chat_template_kwargs")
)
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}
_THINKING = ("enabled", "disabled", "adaptive", "between_tools")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
MESSAGE_NO_OPS: NoOps = {
    "service_tier": is_one_of("auto", "standard_only"),
    "speed": is_one_of("standard"),
    "cache_control": is_object,
    "diagnostics": is_object,
    **dict.fromkeys(("inference_geo", "user_profile_id", "workspace_id"), _is_text),
}


def parse_message(body: Mapping[str, object]) -> MessageReply:
    """Read a request for a message. Raises InvalidArgument or Unsupported naming the parameter."""
    if body.get("max_tokens") is None:
        refuse("max_tokens", None, "the most tokens that the answer may have")
    return MessageReply(read_chat(body))


def read_chat(body: Mapping[str, object]) -> ChatRequest:
    """Read a request for a message, or for the count of its tokens. Raises as `parse_message`."""
    refuse_unknown(body, MESSAGE, MESSAGE_NO_OPS)
    _TEMPERATURE.read(body)
    config = object_of(body, "output_config")
    tools, left_out = _tools(body.get("tools"))
    if body.get("context_management") is not None:
        left_out = (*left_out, "context_management is not applied: the whole prompt is read")
    messages, continues_last = read_messages(body)
    schema, schema_at = _answer_schema(body, config)
    chats = {name: value for name, value in body.items() if name in _OF_CHATS}
    return ChatRequest(
        params=replace(
            read_params(chats, max_tokens=_MAX_TOKENS.read(body)),
            stop=read_stops(body.get("stop_sequences"), "stop_sequences"),
            user=_user(object_of(body, "metadata").get("user_id")),
            left_out=left_out,
        ),
        chat=Chat(
            messages=messages,
            tools=tools,
            kwargs=_template_args(body, config),
            continues_last=continues_last,
        ),
        tool_choice=_tool_choice(body.get("tool_choice"), tools),
        answer_schema=schema,
        answer_schema_at=schema_at,
    )


def _user(value: object) -> str:
    return "" if value is None else read_user({"user": text(value, "metadata.user_id")})


def _template_args(
    body: Mapping[str, object], config: Mapping[str, object]
) -> Mapping[str, object]:
    thinking, effort = object_of(body, "thinking"), config.get("effort")
    kind = thinking.get("type")
    if thinking and kind not in _THINKING:
        refuse("thinking.type", kind, f"one of {', '.join(_THINKING)}")
    if effort is not None and (not isinstance(effort, str) or effort not in _EFFORTS):
        refuse("output_config.effort", effort, f"one of {', '.join(_EFFORTS)}")
    return read_template_args(
        {
            "chat_template_kwargs": body.get("chat_template_kwargs"),
            "thinking": kind != "disabled" if thinking else None,
            "reasoning_effort": _EFFORTS[effort] if isinstance(effort, str) else None,
        }
    )


def _answer_schema(
    body: Mapping[str, object], config: Mapping[str, object]
) -> tuple[Mapping[str, object] | None, str]:
    """The schema, and its place in the request."""
    at, value = "output_config.format", config.get("format")
    if value is None:
        at, value = "output_format", body.get("output_format")
    if value is None:
        return None, ""
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        refuse(at, value, '{"type": "json_schema", "schema": {...}}')
    schema = value.get("schema")
    if not isinstance(schema, dict):
        refuse(f"{at}.schema", schema, "a JSON Schema object")
    return schema, f"{at}.schema"


def _tools(value: object) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    """The tools in the form that templates take, and what is said of those that are left out."""
    if value is None:
        return (), ()
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        refuse("tools", value, f"a list of at most {MAX_TOOLS} tools")
    tools, left_out = [], []
    for index, tool in enumerate(value):
        at = f"tools[{index}]"
        if not isinstance(tool, dict):
            refuse(at, tool, "an object with name and input_schema")
        if tool.get("type") not in (None, "custom"):
            left_out.append(f"{at}.type={shown(tool['type'])} is left out: no node has that tool")
            continue
        name, schema = tool.get("name"), tool.get("input_schema")
        if not isinstance(schema, dict):
            refuse(f"{at}.input_schema", schema, "a JSON Schema object")
        function: dict[str, object] = {"name": name, "parameters": schema}
        check_function(function, at)
        if tool.get("description") is not None:
            function["description"] = text(tool["description"], f"{at}.description")
        if flag(tool, "strict", f"{at}."):
            function["strict"] = True
        tools.append({"type": "function", "function": function})
    cleaned: list[Tool] = json.loads(text(json.dumps(tools, ensure_ascii=False), "tools"))
    return tuple(cleaned), tuple(left_out)


def _tool_choice(value: object, tools: tuple[Tool, ...]) -> ToolChoice:
    if value is None:
        return ToolChoice()
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(kind, str) or kind not in (*_CHOICES, "tool"):
        refuse("tool_choice", value, '{"type": "auto" | "any" | "tool" | "none", ...}')
    if kind in ("any", "tool") and not tools:
        raise InvalidArgument(
            f"tool_choice.type is {shown(kind)}, and there are no tools that a model here can "
            "call; give tools with an input_schema",
            param="tool_choice",
        )
    choice: object = _CHOICES.get(kind)
    if kind == "tool":
        name = text(value.get("name"), "tool_choice.name")
        choice = {"type": "function", "function": {"name": name}}
    given = {"tool_choice": choice}
    if value.get("disable_parallel_tool_use") is not None:
        is_single = flag(value, "disable_parallel_tool_use", "tool_choice.")
        given["parallel_tool_calls"] = not is_single
    return read_tool_choice(given, tools)
