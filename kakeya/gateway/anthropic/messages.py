"""The messages of Anthropic's dialect: content blocks in, messages as templates take them out.

    text, tool_use, tool_result, thinking    are read
    redacted_thinking                        is left out: nobody can read it
    all other blocks                         are refused

The texts of one message are parted by an empty line, but those of an answer, which are the pieces
that it was sent in. Results of tools stand in front of a message's text. Messages of one role that
follow each other are one, as Anthropic has it. A system's message behind the first turn becomes the
user's, in <system-reminder>: most templates have a place for the system at the front only. An
assistant's message at the end is gone on with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kakeya.core.errors import InvalidArgument, Unsupported
from kakeya.gateway.http.body import flag, refuse, shown, text
from kakeya.gateway.openai.messages import MAX_PARTS, check_size, read_call
from kakeya.text.chat import Message, in_turns

_ROLES = ("user", "assistant", "system")
_APART = "\n\n"
_OURS, _THEIRS = "call_", "toolu_"


def call_id_of(tool_use_id: str) -> str:
    """The id of a call by the id of its block, as `tool_use_id_of` wrote it."""
    is_theirs = tool_use_id.startswith(_THEIRS)
    return _OURS + tool_use_id.removeprefix(_THEIRS) if is_theirs else tool_use_id


def tool_use_id_of(call_id: str) -> str:
    """The id of a call's block: templates may show ids, so `call_id_of` gives the same back."""
    return _THEIRS + call_id.removeprefix(_OURS) if call_id.startswith(_OURS) else call_id


def read_messages(body: Mapping[str, object]) -> tuple[tuple[Message, ...], bool]:
    """Read `system` and `messages`, and whether the answer goes on from the last message.

    Raises InvalidArgument or Unsupported naming the field.
    """
    value = body.get("messages")
    if not isinstance(value, list) or not value:
        refuse("messages", value, "a list of at least one message")
    contents = (entry.get("content") for entry in value if isinstance(entry, dict))
    parts = sum(len(content) for content in contents if isinstance(content, list))
    check_size("messages", messages=len(value), parts=parts)
    system = _texts(body.get("system"), "system") if body.get("system") is not None else ""
    turns: list[Message] = [{"role": "system", "content": system}] if system else []
    names: dict[str, str] = {}
    for index, entry in enumerate(value):
        for message in _messages(entry, f"messages[{index}]", names):
            _append(turns, message)
    last = turns[-1]
    if last["role"] == "assistant" and last.get("tool_calls"):
        at = f"messages[{len(value) - 1}]"
        raise InvalidArgument(
            f"{at} ends with tool_use and no message follows; give its tool_result", param=at
        )
    return tuple(in_turns(turns)), last["role"] == "assistant"


def _append(turns: list[Message], message: Message) -> None:
    """Add a message; an answer behind an answer goes on with it."""
    if not turns or not turns[-1]["role"] == message["role"] == "assistant":
        turns.append(message)
        return
    last = turns[-1]
    joined = {**last, "content": f"{last['content']}{message['content']}"}
    thoughts = "".join(str(one.get("reasoning_content", "")) for one in (last, message))
    calls = [call for one in (last, message) for call in _calls(one)]
    turns[-1] = (
        joined
        | ({"reasoning_content": thoughts} if thoughts else {})
        | ({"tool_calls": calls} if calls else {})
    )


def _calls(message: Message) -> list[object]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def _messages(value: object, at: str, names: dict[str, str]) -> Iterator[Message]:
    """The messages that one message of Anthropic's makes; `names` of tools by the id of a call."""
    if not isinstance(value, dict):
        refuse(at, value, "an object with role and content")
    role, content = value.get("role"), value.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        refuse(f"{at}.role", role, f"one of {', '.join(_ROLES)}")
    if isinstance(content, str):
        yield {"role": role, "content": text(content, f"{at}.content")}
        return
    may_be_empty = role == "assistant"
    if not isinstance(content, list) or not (content or may_be_empty):
        refuse(f"{at}.content", content, "a text or a list of content blocks")
    if role == "assistant":
        yield _answer(content, f"{at}.content", names)
        return
    said: list[str] = []
    for index, block in enumerate(content):
        where = f"{at}.content[{index}]"
        if role == "user" and _kind(block, where) == "tool_result":
            yield _result(block, where, names)
        else:
            said.append(_text(block, where))
    if said:
        yield {"role": role, "content": _APART.join(filter(None, said))}


def _answer(blocks: list[object], at: str, names: dict[str, str]) -> Message:
    said, thoughts, calls = "", "", []
    for index, block in enumerate(blocks):
        where = f"{at}[{index}]"
        match _kind(block, where), block:
            case "thinking", dict():
                thoughts += text(block.get("thinking"), f"{where}.thinking")
            case "redacted_thinking", _:
                continue
            case "tool_use", dict():
                name, given = text(block.get("name"), f"{where}.name"), block.get("input")
                call_id = call_id_of(text(block.get("id"), f"{where}.id"))
                if not isinstance(given, dict):
                    refuse(f"{where}.input", given, "an object")
                names[call_id] = name
                calls.append(read_call(call_id, name, given, where))
            case _:
                said += _text(block, where)
    return (
        {"role": "assistant", "content": said}
        | ({"reasoning_content": thoughts} if thoughts else {})
        | ({"tool_calls": calls} if calls else {})
    )


def _result(block: Mapping[str, object], at: str, names: Mapping[str, str]) -> Message:
    call_id = call_id_of(text(block.get("tool_use_id"), f"{at}.tool_use_id"))
    content = block.get("content")
    said = "" if content is None or content == [] else _texts(content, f"{at}.content")
    if flag(block, "is_error", f"{at}."):
        said = f"Error: {said}"
    name = {"name": names[call_id]} if call_id in names else {}
    return {"role": "tool", "content": said, "tool_call_id": call_id, **name}


def _texts(value: object, at: str) -> str:
    if isinstance(value, str):
        return text(value, at)
    if not isinstance(value, list) or len(value) > MAX_PARTS:
        refuse(at, value, f"a text or a list of at most {MAX_PARTS} text blocks")
    return _APART.join(
        filter(None, (_text(block, f"{at}[{index}]") for index, block in enumerate(value)))
    )


def _kind(block: object, at: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        refuse(at, block, 'a content block like {"type": "text", "text": "..."}')
    return kind


def _text(block: object, at: str) -> str:
    kind = _kind(block, at)
    if kind != "text" or not isinstance(block, dict):
        raise Unsupported(
            f'{at}.type={shown(kind)} is not supported here; this model takes "text"', param=at
        )
    return text(block.get("text"), f"{at}.text")
