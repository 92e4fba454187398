"""Conversations as plain text."""

from __future__ import annotations

from kakeya.text.chat import Chat
from kakeya.text.plain import plain_prompt

HI = {"role": "user", "content": "Hi!"}
BRIEF = {"role": "system", "content": "Be brief."}


def test_a_message_alone_is_its_text():
    assert plain_prompt(Chat(messages=(HI,))) == "Hi!"


def test_turns_stand_below_their_roles_and_the_last_line_asks_for_the_answer():
    yes = {"role": "assistant", "content": "Yes?"}
    said = "[system]\nBe brief.\n\n[user]\nHi!\n\n[assistant]\n"
    assert plain_prompt(Chat(messages=(BRIEF, HI))) == said
    assert plain_prompt(Chat(messages=(BRIEF, HI, yes, HI))) == (
        said + "Yes?\n\n[user]\nHi!\n\n[assistant]\n"
    )
    assert plain_prompt(Chat(messages=(BRIEF, HI, yes), continues_last=True)) == said + "Yes?"


def test_tools_and_calls_are_plain_text_too():
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": {"at": "sea"}}}
    chat = Chat(
        messages=(
            HI,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": "blue"},
        ),
        tools=({"type": "function", "function": {"name": "look"}},),
    )
    written = plain_prompt(chat)
    assert written.startswith("[system]\nYou may call tools.")
    assert '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>' in written
    assert written.endswith("[user]\nAnswer of the tool: blue\n\n[assistant]\n")
