"""Lines that change with every request, at the front of system texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.text.changing_lines import (
    ALL_KINDS,
    FRONT_LINES,
    ChangingLine,
    move_changing_lines,
    stable_beginning,
)
from kakeya.text.chat import Chat

BILLING = "x-anthropic-billing-header: cc_version=2.1.36.a1b; cc_entrypoint=cli; cch=0f3a9;"
UUID = "0192f0c1-7d5e-7cc3-98c4-dc0c0c07398f"
DATES = [
    "Current time: 2026-11-25T19:25:33Z",
    "2026-11-25 19:25:33.123",
    "The current date and time is 11/25/2026, 7:25:33 PM",
    "Today is Wed Nov 25 19:25:33 UTC 2026.",
    "- now: Wed, 25 Nov 2026 19:25:33 +0100",
    "timestamp: 1795634733",
]
IDS = [UUID, f"Request ID: {UUID}", "request_id=req_011CSHoEeqs5C35K2UUqR7Fy", f"# id: '{UUID}'"]
STAYS = [
    "Today's date: 2026-11-25",
    "Answer at 10:30:00 sharp and never say what the clock of the other room shows, please.",
    "You are a bot. The time is 2026-11-25 19:25:33. Speak French.",
    "Read the file 0192f0c1-7d5e-7cc3-98c4-dc0c0c07398f.txt",
    "Ratio 3:2:1",
    "session id: as the user says",
    "Bread 12:30:00",
]
CHANGING = st.sampled_from([BILLING, *DATES, *IDS])
LINES = st.lists(
    CHANGING | st.sampled_from([*STAYS, "", "You are an agent."]) | st.text(max_size=9)
)
TEXTS = LINES.map("\n".join)


def chat(*messages: tuple[str, str]) -> Chat:
    return Chat(messages=tuple({"role": role, "content": text} for role, text in messages))


def said(of: Chat) -> list[tuple[object, object]]:
    return [(message["role"], message["content"]) for message in of.messages]


def test_a_billing_header_is_left_out_with_the_empty_line_behind_it():
    asked = chat(("system", f"{BILLING}\n\nYou are an agent.\n\nBe brief."), ("user", "hi"))
    moved, told = move_changing_lines(asked)
    assert said(moved) == [("system", "You are an agent.\n\nBe brief."), ("user", "hi")]
    assert told == (ChangingLine.BILLING_HEADER,)


@pytest.mark.parametrize("line", DATES + IDS)
def test_dates_and_ids_are_moved_in_front_of_the_users_first_message(line: str):
    asked = chat(("system", f"You are an agent.\n{line}\nBe brief."), ("user", "hi"), ("user", "x"))
    moved, told = move_changing_lines(asked)
    assert said(moved) == [
        ("system", "You are an agent.\nBe brief."),
        ("user", f"{line}\n\nhi"),
        ("user", "x"),
    ]
    assert told == (ChangingLine.DATE if line in DATES else ChangingLine.REQUEST_ID,)


@pytest.mark.parametrize("line", STAYS)
def test_a_line_that_says_more_stays(line: str):
    asked = chat(("system", line), ("user", "hi"))
    assert move_changing_lines(asked) == (asked, ())


def test_only_the_front_of_leading_system_messages_is_looked_at():
    front = "\n".join(f"rule {number}" for number in range(FRONT_LINES))
    asked = chat(
        ("system", f"{front}\n{DATES[0]}"), ("user", f"{BILLING}\nhi"), ("system", DATES[0])
    )
    assert move_changing_lines(asked)[0] is asked


def test_a_message_of_changing_lines_alone_goes_and_the_last_one_stays_empty():
    asked = chat(("system", BILLING), ("system", "You are an agent."), ("user", "hi"))
    moved, _ = move_changing_lines(asked)
    assert said(moved) == [("system", "You are an agent."), ("user", "hi")]
    alone, _ = move_changing_lines(chat(("system", BILLING), ("user", "hi")))
    assert said(alone) == [("system", ""), ("user", "hi")]


def test_a_prefix_leaves_out_what_its_requests_bring():
    text = f"{DATES[0]}\nYou are an agent."
    prefix, told = move_changing_lines(chat(("system", text)), is_prefix=True)
    assert (said(prefix), told) == ([("system", "You are an agent.")], (ChangingLine.DATE,))
    whole = chat(("system", text), ("assistant", "hello"))
    assert move_changing_lines(whole) == (whole, ())


@given(TEXTS, st.text(max_size=20), st.frozensets(st.sampled_from(ChangingLine)))
def test_moving_is_idempotent_and_touches_no_other_line(text, question, kinds):
    asked = chat(("system", text), ("user", question))
    moved, told = move_changing_lines(asked, kinds)
    assert move_changing_lines(moved, kinds) == (moved, ())
    assert set(told) <= kinds
    if not told:
        assert moved is asked
    left = [line for line in text.split("\n") if line.strip()]
    kept = [line for line in str(moved.messages[0]["content"]).split("\n") if line.strip()]
    gone = [line for line in left if line not in kept]
    assert [line for line in left if line in kept] == kept
    assert moved.messages[-1]["content"].endswith(question)
    if ChangingLine.BILLING_HEADER not in told:
        head = str(moved.messages[-1]["content"]).removesuffix(question).strip("\n")
        assert all(line.strip() in head for line in gone)


@given(st.text(alphabet=st.characters(exclude_characters="0123456789:"), max_size=300))
def test_text_without_such_lines_is_untouched_byte_for_byte(text: str):
    asked = chat(("developer", text), ("user", text))
    moved, told = move_changing_lines(asked)
    assert moved is asked
    assert told == ()


@given(TEXTS, CHANGING, CHANGING)
def test_the_stable_beginning_is_the_same_for_all_turns(text, one, other):
    first = chat(("system", f"{one}\n{text}"), ("user", "hi"))
    later = chat(("system", f"{other}\n{text}"), ("user", "hi"), ("assistant", "a"), ("user", "b"))
    assert list(stable_beginning(first)) == list(stable_beginning(later))
    assert (
        move_changing_lines(first, ALL_KINDS)[0].messages[0]
        == (move_changing_lines(later, ALL_KINDS)[0].messages[0])
    )
