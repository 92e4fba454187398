"""The messages of a chat, as clients send a conversation back.

    read      role, content, name; of an assistant tool_calls, function_call, reasoning_content or
              reasoning; of a tool tool_call_id
    ignored   other fields of a message or of a text part: they carry a conversation's past
    refused   parts that are no text, and fields that would change the answer (`_CHANGING`)

Roles are system, developer (taken as system), user, assistant, tool and function (taken as tool).
Content is a text or a list of text parts; an assistant may have none. A conversation has at most
MAX_MESSAGES, and MAX_PARTS parts and calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from kakeya.core.errors import InvalidArgument, Unsupported
from kakeya.gateway.http.body import flag, is_deeper, refuse, shown, text
from kakeya.gateway.http.fields import value_field
from kakeya.text.chat import Message

MAX_MESSAGES = 4096
MAX_PARTS = 4096
"""Of all messages together. Each costs some work whatever it says, as a template writes something
around each message."""

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The field that holds the text of a part, by its type."""
_CHANGING = ("audio",)
"""Fields of a message that change the answer, and that no model here can follow."""


def parse_messages(value: object) -> tuple[tuple[Message, ...], bool]:
    """Read the messages of a chat, and whether the answer goes on from the last one.

    Raises InvalidArgument or Unsupported naming the field.
    """
    if not isinstance(value, list) or not value:
        refuse("messages", value, "a list of at least one message")
    lists = [
        entry[name]
        for entry in value
        if isinstance(entry, dict)
        for name in ("content", "tool_calls")
        if isinstance(entry.get(name), list)
    ]
    parts = sum(len(found) for found in lists)
    check_size("messages", messages=len(value), parts=parts)
    messages = tuple(_message(entry, f"messages[{i}]") for i, entry in enumerate(value))
    for index, entry in enumerate(value):
        message = messages[index]
        is_text = message["role"] == "assistant" and "tool_calls" not in message
        is_last = index == len(value) - 1
        if flag(entry, "prefix", f"messages[{index}].") and not (is_last and is_text):
            raise InvalidArgument(
                f"messages[{index}].prefix is true; only the last message can be continued, and "
                "only a text of the assistant's, without calls",
                param=f"messages[{index}].prefix",
            )
    return messages, bool(value[-1].get("prefix"))


def check_size(name: str, *, messages: int, parts: int) -> None:
    """Refuse a conversation that is too long. Raises InvalidArgument naming the parameter."""
    for count, what, most in ((messages, "messages", MAX_MESSAGES), (parts, "parts", MAX_PARTS)):
        if count > most:
            raise InvalidArgument(f"{name} holds {count} {what}; it may hold {most}", param=name)


def _message(value: object, at: str) -> Message:
    if not isinstance(value, dict):
        refuse(at, value, "an object with role and content")
    for name in _CHANGING:
        if value.get(name):
            raise Unsupported(f"{at}.{name} is not supported; leave it out", param=f"{at}.{name}")
    given = value.get("role")
    if not isinstance(given, str) or given not in _ROLES:
        refuse(f"{at}.role", given, f"one of {', '.join(_ROLES)}")
    role = _ROLES[given]
    may_lack = role in ("assistant", "tool")
    content = read_content(value.get("content"), f"{at}.content", may_lack=may_lack)
    message: dict[str, object] = {"role": role, "content": content}
    if role == "assistant":
        message |= _past(value, at)
    for name in ("name", "tool_call_id"):
        if value.get(name) is not None:
            message[name] = text(value[name], f"{at}.{name}")
    return message


def _past(value: Mapping[str, object], at: str) -> dict[str, object]:
    """The thoughts and the calls of an answer that was given earlier."""
    past: dict[str, object] = {}
    thoughts = value.get("reasoning_content") or value.get("reasoning")
    if isinstance(thoughts, str):
        past["reasoning_content"] = text(thoughts, f"{at}.reasoning_content")
    calls = value.get("tool_calls") or []
    if not isinstance(calls, list):
        refuse(f"{at}.tool_calls", calls, "a list of calls")
    read = [_call(one, f"{at}.tool_calls[{index}]") for index, one in enumerate(calls)]
    if value.get("function_call"):
        read.append(_call({"function": value["function_call"]}, f"{at}.function_call"))
    return past | ({"tool_calls": read} if read else {})


def call_of(call_id: str, name: str, arguments: object) -> dict[str, object]:
    """A call as templates take it: with arguments as an object where they are one, and are no
    deeper than a body may be."""
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments)
        except (ValueError, RecursionError):
            read = None
        arguments = read if isinstance(read, dict) and not is_deeper(read) else arguments
    function = {"name": name, "arguments": {} if arguments is None else arguments}
    return {"id": call_id, "type": "function", "function": function}


def _call(value: object, at: str) -> dict[str, object]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(function, dict):
        refuse(at, value, 'a call like {"id": "...", "type": "function", "function": {...}}')
    name = text(function.get("name"), f"{at}.function.name")
    return read_call(value.get("id") or "", name, function.get("arguments"), at)


def read_call(call_id: str, name: str, arguments: object, at: str) -> dict[str, object]:
    """Read a call of an answer that was given earlier."""
    call = call_of(call_id, name, arguments)
    cleaned: dict[str, object] = json.loads(text(json.dumps(call, ensure_ascii=False), at))
    return cleaned


def read_content(value: object, at: str, *, may_lack: bool) -> str:
    """Read a text, or a list of text parts as one. Raises InvalidArgument or Unsupported."""
    if isinstance(value, str):
        return text(value, at)
    if may_lack and (value is None or value == []):
        return ""
    if not isinstance(value, list) or not value:
        refuse(at, value, "a text or a list of text parts")
    return "".join(_part(part, f"{at}[{index}]") for index, part in enumerate(value))


def _part(value: object, at: str) -> str:
    if isinstance(value, str):
        return text(value, at)
    if not isinstance(value, dict):
        refuse(at, value, 'a part like {"type": "text", "text": "..."}')
    kind = value.get("type")
    name = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if name is None:
        raise Unsupported(
            f'{at}.type={shown(kind)} is not supported; this model takes "text"', param=at
        )
    return text(value.get(name), f"{at}.{name}")


_MESSAGE = {
    "type": "object",
    "properties": {"role": {"enum": list(_ROLES)}},
    "required": ["role"],
}
MESSAGES = value_field(
    "messages",
    parse_messages,
    {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": _MESSAGE},
    is_required=True,
)
