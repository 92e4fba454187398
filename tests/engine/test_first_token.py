"""The first token of an answer is told before anything is done for those behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kakeya.engine.job import DecodeJob, DoneFrame, SourceSpec, TokensFrame
from kakeya.engine.sequence import Launch, SequenceRun
from tests.engine.rig import Rig, load_rig, tools

PROMPT = [5, 9, 13, 2, 7] * 6
"""Each n-gram of it was there before: drafts begin at once where they may."""


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    folder: Path = tmp_path_factory.mktemp("models")
    return load_rig(folder / "llama", "llama")


def steps_of(rig: Rig, max_tokens: int) -> tuple[SequenceRun, list[str]]:
    """A run, and what it does up to its first tokens."""
    job = DecodeJob(token_ids=PROMPT, max_tokens=max_tokens, sources=(SourceSpec(kind="ngram"),))
    run = SequenceRun(rig.model, tools(), job)
    seen: list[str] = []
    for step in run.steps():
        if isinstance(step, Launch):
            step.alone()
        seen.append(type(step).__name__)
        if isinstance(step, TokensFrame | DoneFrame):
            assert not isinstance(step, TokensFrame) or len(step.token_ids) == 1
            break
    return run, seen


@pytest.mark.parametrize("max_tokens", [1, 2, 60])
def test_one_plain_step_makes_the_first_token(rig: Rig, max_tokens: int) -> None:
    run, seen = steps_of(rig, max_tokens)
    assert seen == ["PrefillFrame", "Launch", "TokensFrame"]
    assert run.state.in_flight() == 0
    assert len(run._drafting._history) == 0  # the prompt is indexed behind it
    run.finish()


def test_where_only_a_prompt_is_computed_no_token_is(rig: Rig) -> None:
    run, seen = steps_of(rig, 0)
    assert seen == ["PrefillFrame", "DoneFrame"]
    run.finish()
