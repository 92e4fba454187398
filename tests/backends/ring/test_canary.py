"""The comparison of a group's canary with that of one process, and the files of known answers."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.backends.ring import canary
from kakeya.backends.ring.canary import Answer, Different, Equal, Numerics, SaidToken, Tie
from kakeya.backends.ring.canary_answers import AnswerFiles, KnownAnswer, decode, encode
from kakeya.generation.facts import ModelFacts

CPU = Numerics(device="cpu", dtype="float32", quantization="", mlx="0.32.4")
FACTS = ModelFacts(
    model_id="m",
    model_path="/m",
    vocab_size=96,
    context_tokens=512,
    eos_token_ids=(1,),
    prefill_chunk_tokens=64,
)
LOGPROBS = st.floats(-30, 0)


def said(token: int, logprob: float = -0.5, other: int = 9, its: float = -3.0) -> SaidToken:
    return SaidToken(token=token, logprob=logprob, top=((token, logprob), (other, its)))


ANSWERS = st.lists(
    st.builds(said, st.integers(0, 8), LOGPROBS, st.integers(9, 95), LOGPROBS), min_size=1
).map(tuple)


@given(ANSWERS)
def test_an_answer_is_equal_to_itself(answer: Answer) -> None:
    assert canary.compare(answer, answer, CPU) == Equal()
    assert canary.distance(answer, answer) == 0
    assert canary.judge_distance(0.0, CPU) is None


@given(ANSWERS, st.data())
def test_one_probability_that_is_off_is_found_at_whatever_place(
    answer: Answer, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(answer) - 1))
    apart = data.draw(st.sampled_from([-1.0, 1.0])) * data.draw(st.floats(0.1, 5))
    right = answer[place]
    wrong = said(right.token, right.logprob + apart, *right.top[1])
    outcome = canary.distance(answer, (*answer[:place], wrong, *answer[place + 1 :]))
    assert outcome == pytest.approx(abs(apart) / 2 / len(answer))
    if len(answer) <= canary.ANSWER_TOKENS:
        assert canary.judge_distance(outcome, CPU) is not None


@pytest.mark.parametrize("apart", [float("nan"), float("inf")])
def test_a_probability_that_is_no_number_is_too_far(apart: float) -> None:
    assert canary.judge_distance(canary.distance((said(4),), (said(4, apart),)), CPU) is not None


def test_a_token_that_was_not_told_is_at_least_below_all_that_were() -> None:
    assert canary.distance((said(4, -0.5, 9, -1.0),), (said(4, -0.5, 8, -3.0),)) == 1.0


def test_two_tokens_that_are_equally_likely_may_change_places() -> None:
    wanted = (said(3), said(4, -0.7000, 9, -0.7005), said(5))
    group = (said(3), said(9, -0.7001, 4, -0.7004), said(7))
    assert canary.compare(wanted, group, CPU) == Tie(place=1)
    assert canary.compare(wanted, (said(5),), CPU, start=2) == Equal()


@pytest.mark.parametrize(
    "group",
    [said(9, -0.70, 4, -0.75), said(8, -0.70, 4, -0.70), said(9, -0.70, 8, -0.71)],
    ids=["the group is sure", "one process never thought of it", "nor the group of the other"],
)
def test_another_token_is_no_tie_where_one_side_is_sure(group: SaidToken) -> None:
    outcome = canary.compare((said(4, -0.7000, 9, -0.7005),), (group,), CPU)
    assert isinstance(outcome, Different)
    assert "no tie" in outcome.reason


def test_an_answer_that_ends_early_is_different() -> None:
    assert isinstance(canary.compare((said(3), said(4)), (said(3),), CPU), Different)


@given(st.integers(1, 400))
def test_the_prompt_has_more_than_two_pieces_or_there_is_none(piece: int) -> None:
    facts = replace(FACTS, prefill_chunk_tokens=piece)
    tokens = canary.prompt_tokens(facts)
    if tokens:
        assert canary.is_long_enough(tokens, facts)
        assert tokens + canary.ANSWER_TOKENS < facts.context_tokens
        assert max(canary.prompt(facts.vocab_size, tokens)) < facts.vocab_size
    else:
        assert piece > 150


def known(numerics: Numerics = CPU) -> KnownAnswer:
    answer = tuple(said(number % 90) for number in range(canary.ANSWER_TOKENS))
    return KnownAnswer(numerics=numerics, prompt_tokens=320, said_by="one process", answer=answer)


def test_answers_are_kept_by_weights_and_numerics(tmp_path: Path) -> None:
    files, gpu = AnswerFiles(tmp_path), replace(CPU, device="gpu")
    assert files.of("weights") == ()
    for one in (known(), known(gpu), known()):
        files.add("weights", one)
    assert files.of("weights") == (known(), known(gpu))
    assert files.of("others") == ()


@given(st.data())
def test_a_damaged_file_is_no_answer(data: st.DataObject) -> None:
    whole = encode([known()])
    assert decode(whole) == (known(),)
    place = data.draw(st.integers(0, len(whole) - 1))
    damaged = whole[:place] + bytes([whole[place] ^ data.draw(st.integers(1, 255))])
    for torn in (damaged, damaged + whole[place + 1 :]):
        with contextlib.suppress(ValueError):
            assert decode(torn) == (known(),)


def test_a_file_that_is_no_answer_is_left_out_and_replaced(tmp_path: Path) -> None:
    files = AnswerFiles(tmp_path)
    files.add("weights", known())
    (path,) = (tmp_path / "canaries").iterdir()
    path.write_text("[]")
    assert files.of("weights") == ()
    files.add("weights", known())
    assert files.of("weights") == (known(),)
