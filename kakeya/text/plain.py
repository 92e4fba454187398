"""A conversation as plain text, for programs that read a prompt and know no chat templates.

    a single message of the user's     its text, as it is
    any other conversation             each message below a line with its role, and an empty line
                                       between them; the last line asks for the assistant's:

        [system]
        You are brief.

        [user]
        Hello!

        [assistant]

Tools, calls and the answers of tools are written as `text.tools.plain` does. An answer that goes on
from the last message finds the text end with it.
"""

from __future__ import annotations

from kakeya.text.chat import Chat
from kakeya.text.tools.plain import with_tools, without_calls


def plain_prompt(chat: Chat) -> str:
    """Write the prompt that asks for the next answer of a conversation."""
    messages = list(without_calls(chat.messages))
    if chat.tools:
        messages = with_tools(messages, chat.tools, shows_system=True)
    if len(messages) == 1 and messages[0]["role"] == "user":
        return str(messages[0]["content"])
    said = "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in messages)
    return said if chat.continues_last else f"{said}\n\n[assistant]\n"
