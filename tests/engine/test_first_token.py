"""The first token of an answer is told before anything is done for those behind it, and of a prompt
that was answered before even before its own step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kakeya.decoding.sampling import SamplingParams
from kakeya.engine.job import DecodeJob, DoneFrame, SourceSpec, TokensFrame
from kakeya.engine.sequence import Launch, SequenceRun
from kakeya.mlx.verifier import Verifier
from tests.engine.rig import Rig, load_rig, tools
from tests.engine.virtual_rig import Told, VirtualRig, expected

PROMPT = [5, 9, 13, 2, 7] * 6
"""Each n-gram of it was there before: drafts begin at once where they may."""


SAMPLINGS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.9, seed=11),
    "another seed": SamplingParams(temperature=0.9, seed=12),
    "nucleus": SamplingParams(temperature=1.3, top_k=12, top_p=0.8, seed=13),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def rig(folder: Path) -> Rig:
    """Fresh: it has answered nothing yet."""
    return load_rig(folder / "llama", "llama")


def steps_of(
    rig: Rig, max_tokens: int, prompt: list[int] = PROMPT
) -> tuple[SequenceRun, list[str]]:
    """A run, and what it does up to its first tokens."""
    job = DecodeJob(token_ids=prompt, max_tokens=max_tokens, sources=(SourceSpec(kind="ngram"),))
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


def test_the_first_token_of_a_prompt_that_was_answered_waits_for_no_step(rig: Rig) -> None:
    steps_of(rig, 3)[0].finish()
    run, seen = steps_of(rig, 3)
    assert seen == ["PrefillFrame", "TokensFrame"]
    run.finish()
    for other in (PROMPT[:-1], [*PROMPT[:-1], 8], [6, *PROMPT[1:]]):
        run, seen = steps_of(rig, 3, other)
        assert seen[-2:] == ["Launch", "TokensFrame"]
        run.finish()


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_in_whatever_way_it_is_asked_again_the_answer_is_that_of_a_fresh_engine(
    folder: Path, architecture: str
) -> None:
    def fresh() -> Rig:
        return load_rig(folder / architecture, architecture)

    used = fresh()
    used.run(DecodeJob(token_ids=PROMPT, max_tokens=2))
    for name, sampling in SAMPLINGS.items():
        for count, stops in ((1, ()), (40, ()), (40, (5, 9, 13, 30, 60))):
            job = DecodeJob(
                token_ids=PROMPT, max_tokens=count, sampling=sampling, stop_token_ids=stops
            )
            (expected, cold), (found, warm) = fresh().run(job), used.run(job)
            assert (found, warm.reason) == (expected, cold.reason), name
            assert cold.forwards - warm.forwards == (1 if len(expected) == 1 else 0)


def test_an_answer_goes_on_from_kv_that_an_engine_without_the_first_token_has(rig: Rig) -> None:
    """What is kept under a key after each of two equal runs is gone on from alike."""
    kept = []
    for key in ("first", "second"):
        said, _ = rig.run(DecodeJob(token_ids=PROMPT, max_tokens=6, kv_key=key))
        turn = [*PROMPT, *said, 3, 4]
        answer, done = rig.run(DecodeJob(token_ids=turn, max_tokens=12, kv_key=key))
        kept.append((said, answer, done.cached_tokens))
    assert kept[0] == kept[1]


def test_only_what_has_the_bits_of_a_prefill_is_kept(rig: Rig) -> None:
    """KV that was decoded may have others, where it matters how many rows are computed at once."""
    said, _ = rig.run(DecodeJob(token_ids=PROMPT, max_tokens=9, kv_key="k"))
    turn = [*PROMPT, *said, 3, 4]
    held = rig.model.idle_bytes()
    _, done = rig.run(DecodeJob(token_ids=turn, max_tokens=1, kv_key="k"))
    assert done.cached_tokens > len(PROMPT)
    assert rig.model.idle_bytes() == held
    rig.run(DecodeJob(token_ids=turn, max_tokens=1))
    assert rig.model.idle_bytes() > held
    rig.model.shed(1 << 30)
    assert rig.model.idle_bytes() == 0
    assert rig.run(DecodeJob(token_ids=turn, max_tokens=1))[1].forwards == 1


def test_a_prompt_with_other_cuts_is_another_one(rig: Rig) -> None:
    rig.run(DecodeJob(token_ids=PROMPT, max_tokens=1))
    job = DecodeJob(token_ids=PROMPT, max_tokens=1, cuts=(7,))
    assert [rig.run(job)[1].forwards for _ in range(2)] == [1, 0]


def test_a_step_that_failed_is_not_kept(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(state: Verifier) -> int:
        raise RuntimeError("the device is gone")

    job = DecodeJob(token_ids=PROMPT, max_tokens=1)
    with monkeypatch.context() as broken:
        broken.setattr(Verifier, "collect", fails)
        with pytest.raises(RuntimeError, match="is gone"):
            rig.run(job)
    assert [rig.run(job)[1].forwards for _ in range(2)] == [1, 0]


def test_of_steps_that_several_share_nothing_is_kept(rig: Rig) -> None:
    """Their bits may depend on who is beside them."""
    runs = [SequenceRun(rig.model, tools(), DecodeJob(token_ids=PROMPT, max_tokens=1))]
    runs.append(SequenceRun(rig.model, tools(), DecodeJob(token_ids=PROMPT[:-2], max_tokens=1)))
    due = []
    for run in runs:
        due.append(next(step for step in run.steps() if isinstance(step, Launch)))
    rig.model.launch_together([step.state for step in due], [step.token for step in due])
    for step in due:
        step.state.collect()
    assert rig.model.idle_bytes() == 0


class Bell(list[float]):
    """Tells of its first entry, when that is made."""

    def __init__(self, ring: Callable[[], None]) -> None:
        super().__init__()
        self._ring = ring

    def append(self, at_s: float) -> None:
        super().append(at_s)
        if len(self) == 1:
            self._ring()


def test_who_makes_place_between_its_first_token_and_its_step_says_the_same() -> None:
    line = VirtualRig(places=1)
    line.submit(max_tokens=1)
    line.run()
    urgent: list[Told] = []
    slow = line.submit(max_tokens=9, priority=2, client="slow")
    held: list[int] = []

    def make_place() -> None:
        held.append(line.scheduler._running[0].length)
        urgent.append(line.submit(token_ids=[7, 8], max_tokens=3, priority=0, client="urgent"))

    slow.at_s = Bell(make_place)
    line.run()
    assert held == [len(slow.job.token_ids) - 1], "its last token has no KV yet"
    assert urgent[0].at_s[-1] < slow.at_s[1]
    for told in (slow, *urgent):
        assert told.tokens == expected(told.job.token_ids, told.job.max_tokens)
