"""What a chat template writes a prompt from: one conversation, and how it is to be shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

Message = Mapping[str, object]
"""One chat message: the texts role and content, and what else its client gave: name; of an
assistant tool_calls and reasoning_content; of a tool tool_call_id."""

Tool = Mapping[str, object]
"""A function that a model may call, as a JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation that asks for the assistant to answer, or to go on with its last message."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)
    """Variables of the template: enable_thinking, reasoning_effort and others."""
    continues_last: bool = False
    """Whether the answer goes on from the last message, which is the assistant's."""
    plain_tools: bool = True
    """Whether tools are written as plain text for a template that shows none."""

    def followed_by(self, *messages: Message) -> Chat:
        """The conversation with messages behind it, which asks for an answer to them.

        The first one goes on from the last message, where that was to be continued.
        """
        if not self.continues_last or not messages:
            return replace(self, messages=(*self.messages, *messages), continues_last=False)
        *before, last = self.messages
        rest, *others = messages
        whole = {**last, **rest, "content": f"{last['content']}{rest['content']}"}
        return replace(self, messages=(*before, whole, *others), continues_last=False)


def in_turns(messages: Iterable[Message]) -> list[Message]:
    """The messages of a conversation as strict templates take them: the system's in front alone,
    and neighbours of the system's or of the user's as one, parted by an empty line. A later message
    of the system's is the user's, in <system-reminder>."""
    turns: list[Message] = []
    for message in messages:
        last = turns[-1] if turns else None
        if message["role"] == "system" and last is not None and last["role"] != "system":
            said = f"<system-reminder>\n{message['content']}\n</system-reminder>"
            message = {"role": "user", "content": said}
        role = message["role"]
        if last is not None and role == last["role"] and role in ("system", "user"):
            both = (str(one["content"]) for one in (last, message))
            turns[-1] = {**last, "content": "\n\n".join(filter(None, both))}
        else:
            turns.append(message)
    return turns
