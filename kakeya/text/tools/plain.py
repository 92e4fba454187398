"""Tools and calls written as plain text, for chat templates that show none.

The tools stand behind the system's text, or in front of the user's first message where a template
shows no system messages; calls are asked for and shown as the JSON family reads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from kakeya.text.chat import Message, Tool

_ASK = """You may call tools. This is the list of them, one JSON object a line:
<tools>
{tools}
</tools>
To call a tool, write its name and its arguments as one JSON object between these marks:
<tool_call>
{{"name": "NAME", "arguments": {{...}}}}
</tool_call>"""


def tools_text(tools: Sequence[Tool]) -> str:
    """The text that tells a model of tools, and asks for calls that the JSON family reads."""
    return _ASK.format(tools="\n".join(_json(dict(tool)) for tool in tools))


def with_tools(
    messages: Sequence[Message], tools: Sequence[Tool], *, shows_system: bool
) -> list[Message]:
    """The messages with the text of the tools in the one that a model reads first."""
    said = tools_text(tools)
    if not shows_system:
        at = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
        if at is None:
            return [{"role": "user", "content": said}, *messages]
        told = {**messages[at], "content": f"{said}\n\n{messages[at]['content']}"}
        return [*messages[:at], told, *messages[at + 1 :]]
    if messages and messages[0]["role"] == "system":
        first_said = f"{messages[0]['content']}\n\n{said}"
        return [{**messages[0], "content": first_said}, *messages[1:]]
    return [{"role": "system", "content": said}, *messages]


def without_calls(messages: Sequence[Message]) -> Iterator[Message]:
    """Say calls, and the answers of tools, as text; answers that follow each other as one."""
    answers: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            answers.append(f"Answer of the tool: {message['content']}")
            continue
        if answers:
            yield {"role": "user", "content": "\n".join(answers)}
            answers = []
        yield _without_calls(message)
    if answers:
        yield {"role": "user", "content": "\n".join(answers)}


def _without_calls(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    content = str(message["content"])
    said = [f"<tool_call>\n{_json(call['function'])}\n</tool_call>" for call in calls]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join([*[content] * bool(content), *said])}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
