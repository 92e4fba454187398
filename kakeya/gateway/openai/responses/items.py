"""The items of a Responses request, as messages of a chat.

    message               roles system, developer, user, assistant; a text or text parts
    function_call         a call of the assistant's
    function_call_output  what the called function gave: a text or text parts
    reasoning             thoughts of the assistant's: their text, or else their summary

Neighbouring items of the assistant are one turn, as the model gave it: thoughts, text and calls.
Agents put several messages of the system's and of the user's next to each other, and the system's
behind the first turn too. Many templates have one place for the system, the front, and ask that
roles take turns: so neighbours are one message, and a late one of the system's is the user's.
Items of hosted tools are left out, which a warning tells; all others are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kakeya.core.errors import Unsupported
from kakeya.gateway.http.body import refuse, shown, text
from kakeya.gateway.openai.messages import check_size, read_call, read_content
from kakeya.gateway.openai.responses.tools import joined_name
from kakeya.text.chat import Message, in_turns

_ROLES = ("system", "developer", "user", "assistant")
_OF_HOSTED_TOOLS = frozenset(
    {"web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"}
    | {"mcp_list_tools"}
)


def read_input(value: object) -> list[object]:
    """Read `input` as a list of items; a text is a message of the user's. Raises
    InvalidArgument."""
    if isinstance(value, str) and value:
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        refuse("input", value, "a text, or a list of items, that is not empty")
    return value


def parse_items(
    items: Sequence[object], *, instructions: str = "", warn: Callable[[str], None]
) -> tuple[Message, ...]:
    """Read items as messages, behind the instructions. Raises InvalidArgument or Unsupported."""
    turns = _Turns(instructions, warn)
    for index, item in enumerate(items):
        turns.add(item, f"input[{index}]")
    check_size("input", messages=len(turns.messages), parts=turns.parts)
    return tuple(in_turns(turns.messages))


class _Turns:
    """Messages in the making."""

    def __init__(self, instructions: str, warn: Callable[[str], None]) -> None:
        self.messages: list[dict[str, object]] = []
        self.parts = 0
        self._warn = warn
        self._turn: dict[str, object] | None = None  # the assistant's, while it may go on
        if instructions:
            self._add("system", instructions)

    def add(self, item: object, at: str) -> None:
        if not isinstance(item, dict):
            refuse(at, item, "an object")
        kind = item.get("type")
        match "message" if kind is None else kind:
            case "message":
                self._message(item, at)
            case "function_call":
                self._call(item, at)
            case "function_call_output":
                self._result(item, at)
            case "reasoning":
                self._thoughts(item, at)
            case str() if kind in _OF_HOSTED_TOOLS:
                self.parts += 1
                self._warn(f"{at} is left out: this node has no hosted tools ({kind})")
            case _:
                raise Unsupported(f"{at}.type={shown(kind)} is not supported", param=f"{at}.type")

    def _message(self, item: Mapping[str, object], at: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            refuse(f"{at}.role", role, f"one of {', '.join(_ROLES)}")
        content = self._content(item, "content", at, may_lack=role == "assistant")
        if role != "assistant":
            self._add("system" if role == "developer" else role, content)
            return
        # A text behind a text is another answer; one behind a call goes on with its turn.
        is_other = bool(self._turn and self._turn["content"] and "tool_calls" not in self._turn)
        turn = self._assistant(is_new=is_other)
        turn["content"] = f"{turn['content']}{content}"

    def _call(self, item: Mapping[str, object], at: str) -> None:
        name = text(item.get("name"), f"{at}.name")
        if namespace := item.get("namespace"):
            name = joined_name(text(namespace, f"{at}.namespace"), name)
        call_id = text(item.get("call_id"), f"{at}.call_id")
        call = read_call(call_id, name, item.get("arguments"), at)
        self.parts += 1
        calls = self._assistant().setdefault("tool_calls", [])
        assert isinstance(calls, list)
        calls.append(call)

    def _result(self, item: Mapping[str, object], at: str) -> None:
        call_id = text(item.get("call_id"), f"{at}.call_id")
        content = self._content(item, "output", at, may_lack=True)
        self._add("tool", content)
        self.messages[-1]["tool_call_id"] = call_id

    def _thoughts(self, item: Mapping[str, object], at: str) -> None:
        for name in ("content", "summary"):
            parts = item.get(name)
            if parts is not None and not isinstance(parts, list):
                refuse(f"{at}.{name}", parts, "a list of texts")
            found = [_text_of(part, f"{at}.{name}[{i}]") for i, part in enumerate(parts or ())]
            self.parts += len(found)
            if thoughts := "".join(found):
                break
        else:
            return  # only encrypted ones, which are readable to their maker alone
        is_other = bool(self._turn and (self._turn["content"] or "tool_calls" in self._turn))
        turn = self._assistant(is_new=is_other)
        turn["reasoning_content"] = f"{turn.get('reasoning_content', '')}{thoughts}"

    def _content(self, item: Mapping[str, object], name: str, at: str, *, may_lack: bool) -> str:
        value = item.get(name)
        self.parts += len(value) if isinstance(value, list) else 0
        return read_content(value, f"{at}.{name}", may_lack=may_lack)

    def _assistant(self, *, is_new: bool = False) -> dict[str, object]:
        if self._turn is None or is_new:
            self._add("assistant", "")
            self._turn = self.messages[-1]
        return self._turn

    def _add(self, role: str, content: str) -> None:
        self._turn = None
        self.messages.append({"role": role, "content": content})


def _text_of(part: object, at: str) -> str:
    if not isinstance(part, dict):
        refuse(at, part, 'a part like {"type": "reasoning_text", "text": "..."}')
    return text(part.get("text"), f"{at}.text")
