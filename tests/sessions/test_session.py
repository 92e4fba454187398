"""Histories and windows: what is checked before anything changes, what is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import CapacityExhausted, ConfigError, InvalidArgument, InvariantBroken
from kakeya.core.ids import SessionId
from kakeya.generation.facts import ModelFacts
from kakeya.sessions import session as rooms
from kakeya.sessions.session import Session, window_for
from tests.sessions.toy import HashServedModel

FACTS = ModelFacts(
    model_id="toy", model_path="", vocab_size=97, context_tokens=64, eos_token_ids=(0,)
)


def new_session(sink=4, window=12):
    return Session(
        session_id=SessionId("ses-1"),
        model=HashServedModel(),
        facts=FACTS,
        window=window_for(FACTS.context_tokens, sink, window),
        stop_token_ids=frozenset(),
        label="",
        used_mono=0.0,
    )


@given(
    good=st.lists(st.integers(0, 96), max_size=8),
    more=st.lists(st.integers(0, 96), max_size=8),
    bad=st.one_of(st.integers(97, 2**32 - 1)),
)
def test_one_bad_id_anywhere_leaves_the_history_unchanged(good, more, bad):
    session = new_session()
    session.append([1, 2, 3])
    with pytest.raises(InvalidArgument) as failure:
        session.append([*good, bad, *more])
    assert list(session.history) == [1, 2, 3]
    assert f"token_ids[{len(good)}] is {bad}, outside the vocabulary of 97 ids" in str(
        failure.value
    )


@given(
    length=st.integers(0, 60),
    sink=st.integers(0, 6),
    window=st.integers(1, 20),
)
def test_truncation_keeps_the_sink_and_the_newest_window(length, sink, window):
    session = new_session(sink, window)
    ids = [index % 97 for index in range(length)]
    session.append(ids)
    dropped = session.truncate(5)
    assert dropped == max(0, length - sink - window)
    assert list(session.history) == (ids if not dropped else ids[:sink] + ids[length - window :])
    assert session.truncate(5) == 0


@given(
    context=st.integers(8, 200_000),
    sink=st.integers(0, 6),
    filled=st.floats(0.0, 1.2),
    max_tokens=st.integers(1, 5000),
)
def test_a_default_window_cuts_only_for_room_and_then_keeps_half(context, sink, filled, max_tokens):
    window = window_for(context, sink, None)
    length = int(context * filled)
    dropped = window.excess(length, max_tokens)
    fits = length + min(max_tokens, window.reserve_tokens) <= context
    assert dropped == (0 if fits else length - window.kept_tokens)
    assert window.kept_tokens in ((context + sink) // 2, (context + sink - 1) // 2)
    assert 1 <= window.reserve_tokens <= 1024
    left = length - dropped
    assert left + min(max_tokens, window.reserve_tokens) <= context
    assert window.excess(left, max_tokens) == 0


def test_a_session_at_the_edge_keeps_its_prefix_for_many_turns():
    session = new_session(window=None)
    kept_by = []
    for turn in range(60):
        session.append([turn] * 3)
        kept_by.append(session.truncate(2) == 0)
        session.commit(turn)
        session.commit(turn)
        assert session.history_length <= FACTS.context_tokens
    cuts = [turn for turn, kept in enumerate(kept_by) if not kept]
    assert cuts == list(range(12, 60, 6))


@pytest.mark.parametrize(("sink", "window"), [(-1, 4), (4, 0), (4, 60), (64, None)])
def test_a_window_that_does_not_fit_the_context_is_a_configuration_error(sink, window):
    with pytest.raises(ConfigError, match="context of 64"):
        window_for(64, sink, window)


def test_a_history_has_an_upper_bound(monkeypatch):
    monkeypatch.setattr(rooms, "MAX_HISTORY_TOKENS", 10)
    session = new_session()
    session.append([1] * 9)
    with pytest.raises(CapacityExhausted, match="would have 11 tokens and may have 10"):
        session.append([1, 1])
    assert session.history_length == 9


def test_one_call_appends_no_more_than_a_prompt():
    session = new_session()
    with pytest.raises(InvalidArgument, match="holds 131073 ids and one call may append 131072"):
        session.append([1] * (128 * 1024 + 1))
    assert session.history_length == 0
    assert session.append([1] * 128 * 1024) == 128 * 1024


def test_a_committed_token_outside_the_vocabulary_breaks_a_law():
    with pytest.raises(InvariantBroken, match="token 97 of a vocabulary of 97"):
        new_session().commit(97)


def test_a_history_that_lost_or_gained_tokens_breaks_a_law():
    session = new_session()
    session.append([1, 2, 3])
    session.check_monotone(2, 1)
    with pytest.raises(InvariantBroken, match="position: the history had 2 tokens, 2 were"):
        session.check_monotone(2, 2)
