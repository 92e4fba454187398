"""Answers are parted at their marks, however the text was cut, and no text is lost."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.text.tools.answer import AnswerPart, AnswerReader, Said, Thought
from kakeya.text.tools.calls import Called
from kakeya.text.tools.families import JSON_FAMILY, BareJsonFamily, tool_families
from kakeya.text.tools.thinking import ThinkingMarks
from tests.text.texts import SIZES, cut

THINK = ThinkingMarks("<think>", "</think>")
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
LOOK = Called("look", '{"at": "x"}')
FAMILIES = {family.name: family for family in tool_families()}


def parts_of(pieces: list[str], *, is_thinking: bool = False, family=JSON_FAMILY):
    """The parts, with texts of one kind that follow each other put together."""
    reader = AnswerReader(thinking=THINK, is_thinking=is_thinking, family=family)
    parts = [part for piece in pieces for part in reader.feed(piece)] + reader.finish()
    joined: list[AnswerPart] = []
    for kind, group in itertools.groupby(parts, key=type):
        if kind is Called:
            joined += group
        else:
            joined.append(kind("".join(part.text for part in group)))
    return joined


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hello", [Said("hello")]),
        ("", []),
        ("a < b\n", [Said("a < b\n")]),
        ("<think>\nhm\n</think>\n\nyes", [Thought("hm"), Said("yes")]),
        ("<think>\n\n</think>\n\nyes", [Said("yes")]),
        ("\n<think>a</think>", [Thought("a")]),
        ("a <think>b</think>", [Said("a <think>b</think>")]),
        (CALL + "<think>", [LOOK, Said("<think>")]),
        ("<think>no end", [Thought("no end")]),
        ("let me see\n" + CALL, [Said("let me see"), LOOK]),
        (CALL + "\n" + CALL + "\n", [LOOK, LOOK]),
        ("<think>a</think>" + CALL + "done", [Thought("a"), LOOK, Said("done")]),
        ("<think>" + CALL + "</think>b", [Thought(CALL), Said("b")]),
        ("a <tool_call>b</tool_call> c", [Said("a <tool_call>b</tool_call> c")]),
        ("a\n<tool_call>b " + CALL, [Said("a\n<tool_call>b"), LOOK]),
        ("a <tool_call>{", [Said("a <tool_call>{")]),
        (CALL[:-1], [Said(CALL[:-1])]),
        ("</think>a</tool_call>", [Said("</think>a</tool_call>")]),
        ('<tool_call>{"name": 1}</tool_call>', [Said('<tool_call>{"name": 1}</tool_call>')]),
        ('<tool_call>{"name":"f","arguments":NaN}</tool_call>!', None),
    ],
)
def test_an_answer_is_parted_at_its_marks(text, parts):
    assert parts_of([text]) == ([Said(text)] if parts is None else parts)
    assert parts_of(list(text)) == parts_of([text])


def test_thoughts_that_the_prompt_opened_are_thoughts():
    assert parts_of(["\nhm\n</think>\n\nyes"], is_thinking=True) == [Thought("hm"), Said("yes")]


def test_an_end_mark_in_a_string_of_a_call_ends_nothing():
    said = '{"name": "say", "arguments": {"it": "\\"</tool_call> <tool_call>"}}'
    assert parts_of([f"<tool_call>{said}</tool_call>ok"]) == [
        Called("say", '{"it": "\\"</tool_call> <tool_call>"}'),
        Said("ok"),
    ]


def test_a_mark_that_many_ends_follow_is_text_in_the_end():
    text = '<tool_call>{"' + "</tool_call>" * 30
    assert parts_of([text]) == parts_of(list(text)) == [Said(text)]


def test_behind_many_calls_that_cannot_be_read_marks_are_text():
    text = "<tool_call>{</tool_call>" * 16
    assert parts_of([text + CALL]) == [Said(text + CALL)]
    assert parts_of([text[24:] + CALL]) == [Said(text[24:]), LOOK]


def test_a_call_without_an_end_mark_ends_with_the_answer():
    bare = BareJsonFamily()
    text = '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}'
    assert parts_of([text], family=bare) == [Called("f", '{"a": 1}'), Called("g", "{}")]
    assert parts_of([text[:-3]], family=bare) == [Said(text[:-3])]
    listed = FAMILIES["mistral_list"]
    assert parts_of(['[TOOL_CALLS] [{"name": "f", "arguments": {}}]'], family=listed) == [
        Called("f", "{}")
    ]


def test_tokens_of_thoughts_are_counted_with_their_marks():
    reader = AnswerReader(thinking=THINK)
    for piece in ("<think>", "a", "", "b", "</th", "ink>", "\n\n", "yes"):
        reader.feed(piece, tokens=1)
    assert reader.thought_tokens == 6


MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<tool_")
OTHERS = ('{"', '"', "}", "\\", " ", "\n", "a", "é", "<", '{"name": "f", "arguments": {}}', CALL)
TEXTS = st.lists(
    st.sampled_from(MARKS + OTHERS),
    max_size=14,
).map("".join)


@pytest.mark.parametrize("name", ["json_tools", "glm47", "mistral", "qwen3_coder", "llama3"])
@given(text=TEXTS, sizes=SIZES, is_thinking=st.booleans())
def test_parts_do_not_depend_on_how_the_text_was_cut(name, text, sizes, is_thinking):
    family = FAMILIES[name]
    whole = parts_of([text], is_thinking=is_thinking, family=family)
    assert parts_of(cut(text, sizes), is_thinking=is_thinking, family=family) == whole


@given(text=TEXTS)
def test_no_text_is_lost(text):
    """What is no call, no mark of thoughts and no blank comes back, in order."""
    reader = AnswerReader(thinking=THINK, family=JSON_FAMILY)
    gone = "(?:<think>|</think>)*?"
    order = gone
    for part in reader.feed(text) + reader.finish():
        shown = "<tool_call>.*?</tool_call>"
        if not isinstance(part, Called):
            shown = re.escape("".join(part.text.split()))
        order += shown + gone
    assert re.fullmatch(order, "".join(text.split()), re.DOTALL)
