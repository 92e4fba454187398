"""Items as the turns of a chat."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import InvalidArgument
from kakeya.gateway.openai.messages import MAX_PARTS
from kakeya.gateway.openai.responses.items import parse_items

USER = {"role": "user", "content": "u"}
SYSTEM = {"role": "developer", "content": "s"}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
THOUGHT = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]}
TOLD = {"type": "function_call_output", "call_id": "c", "output": "r"}


def call(name: str = "f") -> dict:
    return {"type": "function_call", "call_id": "c", "name": name, "arguments": "{}"}


def turns(*items: dict, instructions: str = "") -> list[tuple[str, str, str, int]]:
    """Of each message the role, the content, the thoughts and the number of calls."""
    return [
        (
            one["role"],
            one["content"],
            one.get("reasoning_content", ""),
            len(one.get("tool_calls", ())),
        )
        for one in parse_items(items, instructions=instructions, warn=pytest.fail)
    ]


def test_neighbouring_items_of_the_assistant_are_one_turn():
    assert turns(THOUGHT, SAID, call(), call(), SAID) == [("assistant", "aa", "t", 2)]
    assert (
        turns(call(), TOLD, call(), TOLD)
        == [
            ("assistant", "", "", 1),
            ("tool", "r", "", 0),
        ]
        * 2
    )


def test_a_text_behind_a_text_and_thoughts_behind_an_answer_begin_a_turn():
    assert turns(SAID, SAID) == [("assistant", "a", "", 0)] * 2
    assert turns(SAID, THOUGHT, call()) == [("assistant", "a", "", 0), ("assistant", "", "t", 1)]


def test_a_summary_stands_for_thoughts_that_are_not_told():
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]}
    assert turns(summary, SAID) == [("assistant", "a", "short", 0)]
    assert turns({"type": "reasoning", "summary": [], "encrypted_content": "x"}, USER) == [
        ("user", "u", "", 0)
    ]


def test_messages_of_the_system_in_front_are_one_and_later_ones_the_users():
    late = "<system-reminder>\ns\n</system-reminder>"
    assert turns(SYSTEM, SYSTEM, USER, SAID, SYSTEM, USER, instructions="i") == [
        ("system", "i\n\ns\n\ns", "", 0),
        ("user", "u", "", 0),
        ("assistant", "a", "", 0),
        ("user", f"{late}\n\nu", "", 0),
    ]


@given(st.lists(st.sampled_from([USER, SAID, THOUGHT, call(), TOLD])))
def test_every_text_and_call_is_in_a_turn_in_its_order(items):
    found = turns(*items)
    texts = {"message": "a", "function_call_output": "r"}
    expected = "".join(texts.get(one.get("type", ""), "u" if one is USER else "") for one in items)
    assert "".join(content.replace("\n\n", "") for _, content, _, _ in found) == expected
    assert [1 for one, other in pairwise(found) if one[0] == other[0] == "user"] == []
    assert sum(calls for *_, calls in found) == sum(one == call() for one in items)
    thoughts = chain.from_iterable(thought for _, _, thought, _ in found)
    assert len(list(thoughts)) == items.count(THOUGHT)


def test_items_are_bounded():
    with pytest.raises(InvalidArgument, match="parts"):
        parse_items([call()] * (MAX_PARTS + 1), warn=pytest.fail)
