"""The first token of an answer is told before anything is done for those behind it, and of a prompt
whose logits are known even before its own step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from kakeya.core.errors import InvalidArgument
from kakeya.engine.steps.prompt import PromptPiece
from kakeya.engine.steps.sequence import Launch, SequenceRun, Step
from kakeya.generation.frames import Done, HistoryLogits, Tokens
from kakeya.generation.kv import LOGIT_BYTES, KvOffer
from kakeya.generation.request import DecodeJob, DraftSource, Sampling
from tests.engine.rig import Rig, load_rig, tools
from tests.engine.virtual_rig import Told, VirtualRig, expected

PROMPT = [5, 9, 13, 2, 7] * 6
"""Each n-gram of it was there before: drafts begin at once where they may."""


SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.9, seed=11),
    "another seed": Sampling(temperature=0.9, seed=12),
    "nucleus": Sampling(temperature=1.3, top_k=12, top_p=0.8, seed=13),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def rig(folder: Path) -> Rig:
    """Fresh: it has answered nothing yet."""
    return load_rig(folder / "llama", "llama")


def steps_of(rig: Rig, max_tokens: int, **more: object) -> tuple[SequenceRun, list[str]]:
    """A run, and what it does up to its first tokens."""
    job = DecodeJob(
        token_ids=PROMPT,
        max_tokens=max_tokens,
        draft_sources=(DraftSource(kind="ngram"),),
        **more,  # type: ignore[arg-type]
    )
    run = SequenceRun(rig.model, tools(), job)
    seen: list[str] = []
    for step in run.steps():
        if isinstance(step, PromptPiece | Launch):
            step.alone()
        if isinstance(step, PromptPiece):
            continue
        seen.append(type(step).__name__)
        if isinstance(step, Tokens | Done):
            assert not isinstance(step, Tokens) or len(step.token_ids) == 1
            break
    return run, seen


def first_launch(steps: Iterator[Step]) -> Launch:
    """Compute a prompt up to its first plain step."""
    for step in steps:
        if isinstance(step, PromptPiece):
            step.alone()
        elif isinstance(step, Launch):
            return step
    raise AssertionError("it ended without a step")


WANTED = KvOffer(wants_logits=True)


def told(rig: Rig, **job: object) -> list[bytes]:
    """The logits that a generation tells of."""
    values: dict[str, object] = {"token_ids": PROMPT, "max_tokens": 1, "offer": WANTED, **job}
    run = SequenceRun(rig.model, rig.tools, DecodeJob(**values))  # type: ignore[arg-type]
    return [frame.logits for frame in run.frames() if isinstance(frame, HistoryLogits)]


@pytest.mark.parametrize("max_tokens", [1, 2, 60])
def test_one_plain_step_makes_the_first_token(rig: Rig, max_tokens: int) -> None:
    run, seen = steps_of(rig, max_tokens)
    assert seen == ["Progress", "Launch", "Tokens"]
    assert run.state.in_flight() == 0
    assert len(run._drafting._history) == 0  # the prompt is indexed behind it
    run.finish()


def test_where_only_a_prompt_is_computed_no_token_is(rig: Rig) -> None:
    run, seen = steps_of(rig, 0, offer=WANTED)
    assert seen == ["Progress", "Done"]
    run.finish()


def test_the_first_token_of_a_prompt_whose_logits_are_known_waits_for_no_step(rig: Rig) -> None:
    (logits,) = told(rig)
    run, seen = steps_of(rig, 3, offer=KvOffer(logits=logits))
    assert seen == ["Progress", "Tokens"]
    run.finish()


@pytest.mark.parametrize("architecture", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_in_whatever_way_it_is_asked_again_the_answer_is_that_of_a_fresh_engine(
    folder: Path, architecture: str
) -> None:
    def fresh() -> Rig:
        return load_rig(folder / architecture, architecture)

    rig = fresh()
    (logits,) = told(rig, max_tokens=2, sampling=SAMPLINGS["sampled"])
    assert told(fresh()) == [logits], "however its own first token was chosen"
    for name, sampling in SAMPLINGS.items():
        for count, stops in ((1, ()), (40, ()), (40, (5, 9, 13, 30, 60))):
            job = DecodeJob(
                token_ids=PROMPT,
                max_tokens=count,
                sampling=sampling,
                stop_token_ids=frozenset(stops),
            )
            expected, cold = fresh().run(job)
            found, warm = rig.run(replace(job, offer=replace(WANTED, logits=logits)))
            assert (found, warm.reason) == (expected, cold.reason), name
            assert cold.usage.forwards - warm.usage.forwards == (1 if len(expected) == 1 else 0)


def test_logits_are_those_of_the_model_as_float32(folder: Path) -> None:
    rig = load_rig(folder / "half", "llama", dtype=mx.bfloat16, quantize_bits=4)
    (logits,) = told(rig)
    row = np.frombuffer(logits, "<f4")
    assert row.shape == (rig.model.facts.vocab_size,)
    (token,), _ = rig.run(DecodeJob(token_ids=PROMPT, max_tokens=1))
    assert int(row.argmax()) == token


def test_logits_of_another_vocabulary_are_refused(rig: Rig) -> None:
    for size in (1, 4, 4 * rig.model.facts.vocab_size - 1, 4 * rig.model.facts.vocab_size + 4):
        with pytest.raises(InvalidArgument, match=f"the logits have {size} bytes, those of a voc"):
            steps_of(rig, 1, offer=KvOffer(logits=bytes(size)))


def test_an_answer_goes_on_from_kv_that_an_engine_without_the_first_token_has(rig: Rig) -> None:
    """What is kept under a key after each of two equal runs is gone on from alike."""
    kept = []
    for key, logits in (("first", b""), ("second", told(rig)[0])):
        said, _ = rig.run(
            DecodeJob(token_ids=PROMPT, max_tokens=6, kv_key=key, offer=KvOffer(logits=logits))
        )
        turn = [*PROMPT, *said, 3, 4]
        answer, done = rig.run(DecodeJob(token_ids=turn, max_tokens=12, kv_key=key))
        kept.append((said, answer, done.usage.cached_tokens))
    assert kept[0] == kept[1]


def test_only_logits_behind_what_has_the_bits_of_a_prefill_are_told(rig: Rig) -> None:
    """KV that was decoded may have others, where it matters how many rows are computed at once."""
    said, _ = rig.run(DecodeJob(token_ids=PROMPT, max_tokens=9, kv_key="k"))
    turn = [*PROMPT, *said, 3, 4]
    assert told(rig, token_ids=turn, kv_key="k") == []
    assert len(told(rig, token_ids=turn)) == 1


def test_they_are_told_to_who_wants_them_and_does_not_know_them(rig: Rig) -> None:
    (logits,) = told(rig)
    assert told(rig, offer=KvOffer()) == []
    assert told(rig, max_tokens=3, offer=replace(WANTED, logits=logits)) == []
    held = rig.model.idle_bytes()
    assert held == 0, "an engine keeps none of it"


def test_of_steps_that_several_share_nothing_is_told(rig: Rig) -> None:
    """Their bits may depend on who is beside them."""
    wanted = DecodeJob(token_ids=PROMPT, max_tokens=1, offer=WANTED)
    runs = [SequenceRun(rig.model, tools(), wanted)]
    runs.append(SequenceRun(rig.model, tools(), replace(wanted, token_ids=PROMPT[:-2])))
    steps = [run.steps() for run in runs]
    due = [first_launch(one) for one in steps]
    assert all(launch.keeps_logits for launch in due)
    rig.model.launch_together([step.state for step in due], [step.token for step in due])
    for one in steps:
        assert not [step for step in one if isinstance(step, HistoryLogits)]


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
    first, vocabulary = expected([1, 2, 3], 1)[0], line.model.facts.vocab_size
    logits = b"".join(
        int(one == first).to_bytes(LOGIT_BYTES, "little") for one in range(vocabulary)
    )
    urgent: list[Told] = []
    slow = line.submit(max_tokens=9, priority=4, client="slow", offer=KvOffer(logits=logits))
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
