"""A conversation: its commands, and what is sent with the next turn."""

from __future__ import annotations

import pytest

from kakeya.cli.talk.conversation import HELP, TerminalChat
from kakeya.core.errors import InvalidArgument


def talk(**fields: object) -> TerminalChat:
    return TerminalChat(base="small", models=("small", "large", "a:b"), **fields)  # type: ignore[arg-type]


def test_turns_are_sent_whole_with_the_system_first() -> None:
    chat = talk(system="be brief")
    assert chat.take("hello").asks
    chat.answered("hi")
    assert chat.take("and now?").asks
    assert [(one["role"], one["content"]) for one in chat.messages] == [
        ("system", "be brief"),
        ("user", "hello"),
        ("assistant", "hi"),
        ("user", "and now?"),
    ]


def test_a_question_without_an_answer_is_taken_back() -> None:
    chat = talk()
    chat.take("hello")
    chat.answered("")
    assert chat.messages == []


def test_another_answer_to_the_same_question() -> None:
    chat = talk()
    with pytest.raises(InvalidArgument, match="nothing was asked"):
        chat.take("/again")
    chat.take("hello")
    chat.answered("hi")
    assert chat.take("/again").asks
    assert chat.messages == [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("line", "model"),
    [
        ("/model large", "large"),
        ("/model large:poet", "large:poet"),
        ("/adapter poet", "small:poet"),
        ("/adapter", "small"),
        ("/model a:b", "a:b"),
    ],
)
def test_models_and_adapters_are_chosen(line: str, model: str) -> None:
    chat = talk()
    chat.take("hello")
    assert model in chat.take(line).text
    assert chat.model == model
    assert chat.messages


def test_a_new_system_begins_anew() -> None:
    chat = talk()
    chat.take("hello")
    chat.answered("hi")
    assert chat.take("/system  be brief ").text
    assert chat.messages == [{"role": "system", "content": "be brief"}]
    chat.take("/system")
    assert chat.messages == []


def test_what_is_misspelt_is_told_and_changes_nothing() -> None:
    chat = talk()
    with pytest.raises(InvalidArgument, match=r"no model 'larg' is served; did you mean large\?"):
        chat.take("/model larg")
    with pytest.raises(InvalidArgument, match=r"there is no /modl; did you mean /model\?"):
        chat.take("/modl large")
    assert chat.model == "small"
    assert chat.take("/help").text == HELP
    assert chat.take("  ") == chat.take("")
    assert chat.take("/quit").ends
    assert chat.take("/model").text.splitlines() == ["* small", "  large", "  a:b"]
